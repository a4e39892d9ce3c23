"""The static bytes of every token, read from the serialised tokenizer; shared by all sequences."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from detok_svc.decoder_steps import (
    DecoderSteps,
    Joining,
    byte_level_alphabet,
    byte_token_value,
    read_decoder,
)
from protos.wire.errors import StartupError

# What a token adds to the text: text; bytes that need their neighbours to become text; or nothing.
Piece = str | bytes | None


class _Model(msgspec.Struct):
    # A Unigram model lists (piece, score); the others map pieces to ids.
    vocab: dict[str, int] | list[tuple[str, float]]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Document(msgspec.Struct):
    """The parts of a tokenizer.json that decoding needs. Merges, most of the file, are skipped."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


class TokenBytes:
    """What each token id becomes, as one list per way of treating special tokens.

    The vocabulary alone is read, not the whole tokenizer: for 262,144 tokens this takes a tenth of
    the memory and time of loading it into the `tokenizers` library.

    pieces: by token id; None where no token has the id.
    shown_pieces: the same with None for special tokens, for decoding with skip_special_tokens.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        """StartupError when the document is not a tokenizer, or its decoder is not supported."""
        try:
            document = msgspec.json.decode(tokenizer_json, type=_Document)
        except msgspec.MsgspecError as error:
            raise StartupError(f"the serialised tokenizer cannot be read: {error}") from error
        self.steps: DecoderSteps = read_decoder(document.decoder)
        tokens = _tokens_by_id(document)
        special = {added.content for added in document.added_tokens if added.special}
        piece_of = _piece_function(self.steps)
        self.pieces: list[Piece] = [None if token is None else piece_of(token) for token in tokens]
        self.special_ids = frozenset(
            token_id for token_id, token in enumerate(tokens) if token in special
        )
        self.shown_pieces: list[Piece] = list(self.pieces)
        for token_id in self.special_ids:
            self.shown_pieces[token_id] = None
        self._first_pieces = _first_pieces(self.steps, tokens)
        self._special_by_text = {self.text(token_id): token_id for token_id in self.special_ids}
        # By the special tokens that are shown though others are not: a few sets for all requests.
        self._partly_shown: dict[frozenset[int], list[Piece]] = {frozenset(): self.shown_pieces}

    def decoding_pieces(
        self, skip_special_tokens: bool, shown_control_tokens: Sequence[str] = ()
    ) -> list[Piece]:
        """The list for one way of decoding; `shown_control_tokens` are texts not to be skipped."""
        if not skip_special_tokens:
            return self.pieces
        found = (self.special_token_of(text) for text in shown_control_tokens)
        shown = frozenset(token_id for token_id in found if token_id is not None)
        if shown not in self._partly_shown:
            pieces = list(self.shown_pieces)
            for token_id in shown:
                pieces[token_id] = self.pieces[token_id]
            self._partly_shown[shown] = pieces
        return self._partly_shown[shown]

    def first_piece(self, token_id: int) -> str:
        """The text of a token that is the first of its text (DecoderSteps.first_token_drops)."""
        first = self._first_pieces.get(token_id)
        return self.text(token_id).replace(" ", "") if first is None else first

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, whatever stands around it; b"" for an id without a token."""
        piece = self.pieces[token_id] if token_id < len(self.pieces) else None
        return piece.encode() if isinstance(piece, str) else piece or b""

    def text(self, token_id: int) -> str:
        r"""The token's own text; bytes that are no whole character are written `\xNN`."""
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def special_token_of(self, text: str) -> int | None:
        """The special token whose text this is, or None."""
        return self._special_by_text.get(text)


def _tokens_by_id(document: _Document) -> list[str | None]:
    vocab = document.model.vocab
    if isinstance(vocab, dict):
        size = 1 + max(vocab.values(), default=-1)
        pairs = list(vocab.items())
    else:
        size = len(vocab)
        pairs = [(piece, token_id) for token_id, (piece, _) in enumerate(vocab)]
    size = max([size, *(added.id + 1 for added in document.added_tokens)])
    tokens: list[str | None] = [None] * size
    for token, token_id in pairs:
        tokens[token_id] = token
    for added in document.added_tokens:
        tokens[added.id] = added.content
    return tokens


def _piece_function(steps: DecoderSteps) -> Callable[[str], str | bytes]:
    if steps.joining is Joining.BYTE_LEVEL:
        byte_of = byte_level_alphabet()

        def byte_level_piece(token: str) -> str | bytes:
            text = steps.text(token)
            try:
                data = bytes([byte_of[character] for character in text])
            except KeyError:
                # One character outside the alphabet makes the whole token stand for itself.
                return text
            try:
                return data.decode()
            except UnicodeDecodeError:
                return data

        return byte_level_piece
    if steps.joining is Joining.BYTE_FALLBACK:

        def byte_fallback_piece(token: str) -> str | bytes:
            text = steps.text(token)
            value = byte_token_value(text)
            return text if value is None else bytes([value])

        return byte_fallback_piece
    return steps.text


def _first_pieces(steps: DecoderSteps, tokens: list[str | None]) -> dict[int, str]:
    """First texts of the tokens that hold a true blank, which must not be dropped with the rest."""
    dropped = steps.first_token_drops
    if not dropped:
        return {}
    return {
        token_id: token.replace(dropped, "")
        for token_id, token in enumerate(tokens)
        if token is not None and " " in token
    }
