"""Joined texts of tokens equal decoding all ids at once, for any ids, grouping and prompt."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from detok_svc.incremental_decoder import IncrementalDecoder, make_decoder
from detok_svc.token_bytes import TokenBytes
from tests.fakes.tiny_tokenizers import byte_fallback, byte_level


def added_tokens() -> list[AddedToken]:
    return [
        AddedToken("<|end|>", special=True),
        AddedToken("<think>", special=False),
        AddedToken("Ġ", special=False, normalized=True),
        AddedToken("naïve ", special=False, single_word=True, normalized=False),
        AddedToken("<0x41>", special=False),
        AddedToken("<0xC3>", special=True),
        AddedToken("<\uff5csep\uff5c>", special=True, lstrip=True, rstrip=True),
        AddedToken("▁▁", special=False),
        AddedToken(" ", special=False, normalized=False),
        AddedToken("\ufffd", special=False),
    ]


def merged_byte_level() -> Tokenizer:
    """Byte-level, with merges that cross the borders of characters, and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("Ġ", "ð"), ("Ġð", "Ł"), ("¦", "ľ"), ("Ã", "±"), ("a", "Ã"), ("ľ", "b")]
    vocab = {character: index for index, character in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    # A hole in the ids, and a piece outside the byte alphabet.
    vocab["é€"] = len(vocab) + 3
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([token for token in added_tokens() if not token.special])
    tokenizer.add_special_tokens([token for token in added_tokens() if token.special])
    return tokenizer


def text_tokenizer(decoder: decoders.Decoder, *pieces: str) -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(["▁", "▁▁a", "▁b", "c", " d▁", *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_tokens([token for token in added_tokens() if not token.special])
    tokenizer.add_special_tokens([token for token in added_tokens() if token.special])
    return tokenizer


def with_decoder(tokenizer: Tokenizer, *steps: decoders.Decoder) -> Tokenizer:
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


REPLACE = decoders.Replace("▁", " ")
FALLBACK, FUSE = decoders.ByteFallback(), decoders.Fuse()
TOKENIZERS: dict[str, Tokenizer] = {
    "BL": byte_level(),
    "BF": byte_fallback(),
    "BF without Strip": with_decoder(byte_fallback(), REPLACE, FALLBACK, FUSE),
    "BF strips three": with_decoder(
        byte_fallback(), REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 3, 0)
    ),
    "merged byte-level": merged_byte_level(),
    "byte-level in a sequence, then strip": with_decoder(
        merged_byte_level(), decoders.ByteLevel(), FUSE, decoders.Strip("a", 2, 0)
    ),
    "fallback with added tokens": text_tokenizer(
        decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)]),
        *(
            f"<0x{byte:02X}>"
            for byte in (0x20, 0x41, 0x80, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xBD, 0xBF, 0xEF)
        ),
        "<0x+F>",
        "<0xG0>",
    ),
    "replaced by a pattern": text_tokenizer(
        decoders.Sequence([decoders.Replace(Regex("[▁c]+"), "<0xE2>"), REPLACE, FALLBACK])
    ),
    "Metaspace": text_tokenizer(decoders.Metaspace()),
    "Metaspace that prepends nothing": text_tokenizer(decoders.Metaspace(prepend_scheme="never")),
}


def tokens_of(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer.to_str().encode())


TOKEN_BYTES = {name: tokens_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def expected_text(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip_special_tokens: bool
) -> str:
    """decode(prompt + output) without the longest prefix that decode(prompt) shares with it."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip_special_tokens)
    common = 0
    while common < min(len(before), len(whole)) and before[common] == whole[common]:
        common += 1
    return whole[common:]


def texts_of(decoder: IncrementalDecoder, output: list[int]) -> tuple[list[str], str]:
    """The text of each token, and what the end added after the last."""
    texts = [text for token_id in output for text in decoder.decode(token_id)]
    held, rest = decoder.flush()
    return texts + held, rest


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, list[int], list[int], bool]:
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    vocab = tokenizer.get_vocab()
    rare = sorted(vocab[piece] for piece in vocab if len(piece) > 1 or piece in " ▁Ġ")
    texts = [tokenizer.encode(text).ids for text in ("\U0001f99c", "é€", "\ufffd", " a  b", "한")]
    ids = st.sampled_from(rare) | st.integers(0, max(vocab.values()) + 3)
    fragment = st.lists(ids, min_size=1, max_size=3) | st.sampled_from(texts)
    token_ids = [token_id for part in draw(st.lists(fragment, max_size=8)) for token_id in part]
    num_prompt_tokens = draw(st.integers(0, len(token_ids)))
    return name, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:], draw(st.booleans())


@given(sequences())
@settings(max_examples=1000, deadline=None)
def test_joined_texts_equal_decoding_all_ids(case: tuple[str, list[int], list[int], bool]) -> None:
    name, prompt, output, skip = case
    texts, rest = texts_of(make_decoder(TOKEN_BYTES[name], skip, prompt), output)
    assert "".join(texts) + rest == expected_text(TOKENIZERS[name], prompt, output, skip)
    assert len(texts) == len(output)


class CountingIds(list[int]):
    """Token ids that count how often one is looked at."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_only_the_ends_of_a_long_prompt_are_looked_at(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = CountingIds(tokenizer.encode("b a c").ids * 20_000)
    make_decoder(TOKEN_BYTES[name], True, prompt)
    assert prompt.num_reads < 20


def test_a_character_that_the_prompt_begins_belongs_to_the_output() -> None:
    bird = TOKENIZERS["BL"].encode("🦜").ids
    assert texts_of(make_decoder(TOKEN_BYTES["BL"], True, bird[:3]), bird[3:]) == (["🦜"], "")
    assert texts_of(make_decoder(TOKEN_BYTES["BL"], True, bird[:3]), []) == ([], "")


def test_byte_tokens_are_held_while_their_run_may_be_text_and_no_longer() -> None:
    ids = TOKENIZERS["BF"].get_vocab()
    decoder = make_decoder(TOKEN_BYTES["BF"], True, [ids["a"]])
    assert decoder.decode(ids["<0xC3>"]) == []
    assert decoder.decode(ids["<0xA9>"]) == []
    assert decoder.decode(ids["<s>"]) == []
    assert decoder.decode(ids["▁b"]) == ["", "é", "", " b"]
    assert decoder.decode(ids["<0x41>"]) == []
    assert decoder.decode(ids["<0xFF>"]) == ["\ufffd", "\ufffd"]
    assert decoder.decode(ids["<0x41>"]) == ["\ufffd"]
    assert decoder.decode(ids["b"]) == ["b"]
