"""The bound of a tokenizer holds for every text, and there is none where it would not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.fakes.tiny_tokenizers import byte_fallback, byte_level
from tests.fakes.trained_tokenizers import byte_level_bpe, metaspace_bpe, prepending_bpe
from tokenizer_svc.token_bound import token_bound


def without_a_byte() -> Tokenizer:
    """Byte level, but with no token for U+0004, as the default model's."""
    vocabulary = byte_level().get_vocab(with_added_tokens=False)
    kept = {token: token_id for token, token_id in vocabulary.items() if token != "Ą"}
    tokenizer = Tokenizer(models.BPE(kept, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = byte_level_bpe([])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "trained": byte_level_bpe([]),
    "metaspace": metaspace_bpe([]),
    "prepending": prepending_bpe([]),
    "without a byte": without_a_byte(),
    "composing": composing(),
}
TEXTS = st.text() | st.text(alphabet="ab \n\u0004\u0301\u0323a", max_size=200)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    bound = token_bound(tokenizer)
    if bound is not None:
        assert len(tokenizer.encode(text, add_special_tokens=False)) >= bound.fewest_tokens(text)


@pytest.mark.parametrize("name", ["byte level", "trained", "without a byte", "composing"])
def test_byte_level_tokenizers_have_a_bound(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    bound = token_bound(tokenizer)
    assert bound is not None
    longest = max(map(len, tokenizer.get_vocab()))
    assert bound.longest_token == longest * (4 if name == "composing" else 1)
    assert bound.dropped == ("\u0004" if name == "without a byte" else "")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", normalizers.Strip()),
        ("normalizer", normalizers.Replace("ab", "")),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        ("model", models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        ("model", models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True)),
    ],
)
def test_what_leaves_characters_out_has_no_bound(part: str, value: Any) -> None:
    tokenizer = byte_level()
    if part == "model":
        tokenizer = Tokenizer(value)
    else:
        setattr(tokenizer, part, value)
    assert token_bound(tokenizer) is None


def test_a_token_that_takes_white_space_along_leaves_no_bound() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    assert token_bound(tokenizer) is None
