"""What the serialised tokenizer says of each token, and which decoders can be served."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from detok_svc.decoder_steps import byte_level_alphabet, byte_token_value, read_decoder
from detok_svc.token_bytes import TokenBytes
from protos.wire.errors import StartupError
from tests.fakes.detok_line import token_bytes
from tests.fakes.tiny_tokenizers import IM_END, IM_START, byte_fallback, byte_level


def test_the_byte_alphabet_is_the_librarys() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    decoder = decoders.ByteLevel()
    for character, byte in alphabet.items():
        assert decoder.decode([character]) == bytes([byte]).decode(errors="replace")


def test_byte_level_tokens_are_text_where_they_are_whole_characters() -> None:
    tokens = token_bytes(byte_level())
    assert [tokens.pieces[i] for i in (64, 172, 253, IM_END)] == [
        "a",
        b"\xf0",
        b"\x9f",
        "<|im_end|>",
    ]
    assert tokens.shown_pieces[IM_END] is None
    assert tokens.token_bytes(172) == b"\xf0" and tokens.text(172) == r"\xf0"
    assert tokens.token_bytes(10_000) == b"" and tokens.text(10_000) == ""


def test_chosen_control_tokens_can_be_shown() -> None:
    tokens = token_bytes(byte_level())
    shown = tokens.decoding_pieces(True, ["<|im_end|>", "no token"])
    assert shown[IM_END] == "<|im_end|>" and shown[IM_START] is None
    assert tokens.decoding_pieces(True, ["<|im_end|>"]) is shown
    assert tokens.decoding_pieces(True) is tokens.shown_pieces
    assert tokens.decoding_pieces(False, ["<|im_end|>"]) is tokens.pieces


def test_byte_fallback_tokens_are_bytes_and_texts_with_blanks() -> None:
    tokens = token_bytes(byte_fallback())
    ids = byte_fallback().get_vocab()
    pieces = [tokens.pieces[ids[piece]] for piece in ("<0x41>", "▁a", "</s>")]
    assert pieces == [b"A", " a", "</s>"]
    assert tokens.special_ids == {ids["<s>"], ids["</s>"]}


@pytest.mark.parametrize(
    ("token", "value"),
    [("<0x0A>", 10), ("<0xff>", 255), ("<0x+F>", 15), ("<0x-1>", None), ("<0x1>", None)],
)
def test_byte_tokens_are_those_that_the_library_knows(token: str, value: int | None) -> None:
    assert byte_token_value(token) == value
    expected = token if value is None else bytes([value]).decode(errors="replace")
    assert decoders.ByteFallback().decode([token]) == expected


def test_special_tokens_are_found_by_their_text() -> None:
    tokens = token_bytes(byte_level())
    assert tokens.special_token_of("<|im_end|>") == IM_END
    assert tokens.special_token_of("a") is None


def test_pieces_of_a_unigram_model_are_read_too() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], 0, False))
    tokenizer.decoder = decoders.Metaspace()
    tokens = token_bytes(tokenizer)
    assert tokens.pieces == ["<unk>", " a", "b"]
    assert tokens.first_piece(1) == "a"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip of Fuse, Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Replace"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]), "ByteLevel"),
        (decoders.Sequence([decoders.Replace("a", "b"), decoders.Metaspace()]), "Metaspace"),
    ],
)
def test_a_decoder_that_cannot_be_served_is_named(decoder: Any, named: str) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    with pytest.raises(StartupError, match=f"not supported: step {named}"):
        token_bytes(tokenizer)


def test_a_tokenizer_without_a_decoder_is_refused() -> None:
    with pytest.raises(StartupError, match="no decoder"):
        read_decoder(None)


@pytest.mark.parametrize("document", [b"", b"{}", b"[]", b'{"model": {"vocab": 3}}'])
def test_what_is_no_tokenizer_is_refused(document: bytes) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        TokenBytes(document)
