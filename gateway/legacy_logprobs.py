"""Log-probabilities in the form of /v1/completions: four lists of one entry per token."""

from collections.abc import Iterable, Sequence
from typing import Any

from protos.detok.v1 import detok_pb2

Lists = dict[str, list[Any]]


class TextOffset:
    """Counts characters through tokens that may hold parts of one, by UTF-8's first bytes.

    num_characters: how many stand before the first token.
    """

    def __init__(self, num_characters: int = 0) -> None:
        self._num_begun = num_characters

    def advance(self, token_bytes: bytes) -> int:
        """The index of the character that the token begins in; moves past the token."""
        continues = bool(token_bytes) and _is_continuation(token_bytes[0])
        offset = self._num_begun - 1 if continues and self._num_begun else self._num_begun
        self._num_begun += sum(not _is_continuation(byte) for byte in token_bytes)
        return offset


def output_logprobs(tokens: Iterable[detok_pb2.TokenLogprobs], offset: TextOffset) -> Lists:
    """Of sampled tokens, which `offset` stands before."""
    entries = list(tokens)
    return {
        "tokens": [entry.token.text for entry in entries],
        "token_logprobs": [entry.token.logprob for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": [offset.advance(entry.token.text_bytes) for entry in entries],
    }


def prompt_logprobs(tokens: Sequence[detok_pb2.TokenLogprobs], num_top: int, text: str) -> Lists:
    """Of the tokens of the prompt `text`, with the `num_top` likeliest of each.

    The first has no log-probability: nothing stands before it.
    """
    return {
        "tokens": [entry.token.text for entry in tokens],
        "token_logprobs": [None, *(entry.token.logprob for entry in tokens[1:])],
        "top_logprobs": [None, *(_top(entry, num_top) for entry in tokens[1:])],
        "text_offset": _offsets_within(text, tokens),
    }


def joined(first: Lists, second: Lists) -> Lists:
    return {name: first[name] + second[name] for name in first}


def _offsets_within(text: str, tokens: Iterable[detok_pb2.TokenLogprobs]) -> list[int]:
    """Where each token of a prompt begins in its text, in characters.

    A token that the tokenizer added, such as BOS, is not in the text and takes no room in it; a
    blank that it put before the text is not in it either.
    """
    encoded = text.encode()
    offsets: list[int] = []
    position = num_begun = 0
    for entry in tokens:
        token_bytes = entry.token.text_bytes
        if not encoded.startswith(token_bytes, position):
            token_bytes = token_bytes.removeprefix(b" ")
        if not encoded.startswith(token_bytes, position):
            token_bytes = b""
        inside = encoded[position : position + 1]
        continues = bool(inside) and _is_continuation(inside[0])
        offsets.append(num_begun - continues)
        position += len(token_bytes)
        num_begun += sum(not _is_continuation(byte) for byte in token_bytes)
    return offsets


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _top(entry: detok_pb2.TokenLogprobs, num_top: int | None = None) -> dict[str, float] | None:
    """By text; the token itself is always among them. None when no likeliest were asked for."""
    likeliest = entry.top[:num_top]
    if not likeliest:
        return None
    # Of two tokens with one text the likelier stays: later entries do not replace it.
    top: dict[str, float] = {}
    for token in (*likeliest, entry.token):
        top.setdefault(token.text, token.logprob)
    return top
