"""Ids to text, one token at a time, exactly as decoding all ids at once would.

The text of an output is defined from ids alone: it is `decode(prompt + output)` without the longest
prefix that it shares with `decode(prompt)`. So a character that the prompt leaves unfinished and
the output completes belongs to the output, and whatever `decode(prompt)` has already, such as a
U+FFFD for broken bytes, does not come again.
"""

from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Final

from detok_svc.decoder_steps import Joining
from detok_svc.token_bytes import Piece, TokenBytes

REPLACEMENT: Final = "\ufffd"
# An unfinished character has at most so many bytes.
_MAX_UNFINISHED_BYTES: Final = 3


class IncrementalDecoder(ABC):
    """The decoder of one sequence. pieces: TokenBytes.decoding_pieces.

    The work per token is constant, amortised, and of a prompt only its ends are looked at.
    """

    def __init__(
        self, tokens: TokenBytes, pieces: list[Piece], prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokens = tokens
        self._pieces = pieces
        # The beginning of prompt + output is special in two ways, until it has passed.
        self._num_strip_left = tokens.steps.num_strip_left
        self._drops_first = bool(tokens.steps.first_token_drops)
        # What decode(prompt) has at its end that may yet read otherwise.
        self._prompt_tail = ""
        # Whether any of the three above is still set.
        self._at_edge = self._is_at_edge()
        self._prime(prompt_token_ids)

    @abstractmethod
    def decode(self, token_id: int) -> list[str]:
        """Takes the next token. Returns the texts of the tokens that became known, oldest first.

        One text per token taken, in all, though it may come later than its token; an empty one for
        a token that adds nothing or only begins a character.
        """

    @abstractmethod
    def flush(self) -> tuple[list[str], str]:
        """Ends the text: texts of the tokens that were still unknown, and text after them."""

    @property
    @abstractmethod
    def has_unfinished_character(self) -> bool:
        """Whether tokens whose texts were returned have begun a character and not finished it."""

    def adds_text(self, token_id: int) -> bool:
        """Whether the token adds anything by itself."""
        return token_id < len(self._pieces) and bool(self._pieces[token_id])

    @abstractmethod
    def _reset(self) -> None:
        """Forgets all that the tokens so far left unfinished."""

    @abstractmethod
    def _tail_start(self, token_ids: Sequence[int]) -> int:
        """An index such that only tokens from it on matter to what is unfinished at the end."""

    @abstractmethod
    def _unfinished_text(self) -> str:
        """How the text would go on if it ended now."""

    @abstractmethod
    def _own_prompt(self) -> None:
        """Notes that the tokens so far are the prompt's, and gives no text of their own."""

    def _piece(self, token_id: int) -> Piece:
        return self._pieces[token_id] if token_id < len(self._pieces) else None

    def _prime(self, token_ids: Sequence[int]) -> None:
        index = 0
        while self._at_edge and index < len(token_ids):
            self.decode(token_ids[index])
            index += 1
        tail_start = self._tail_start(token_ids)
        if tail_start > index:
            self._reset()
            index = tail_start
        for token_id in token_ids[index:]:
            self.decode(token_id)
        self._own_prompt()
        self._prompt_tail, _ = self._strip(self._unfinished_text())
        self._at_edge = self._is_at_edge()

    def _is_at_edge(self) -> bool:
        return bool(self._num_strip_left or self._drops_first or self._prompt_tail)

    def _pass_edge(self, text: str) -> str:
        """`text`, the next of the sequence, without what is cut at the beginning of the output."""
        text, self._num_strip_left = self._strip(text)
        if self._prompt_tail:
            num_common = _common_prefix_length(self._prompt_tail, text)
            rest = self._prompt_tail[num_common:]
            self._prompt_tail = rest if num_common == len(text) else ""
            text = text[num_common:]
        self._at_edge = self._is_at_edge()
        return text

    def _strip(self, text: str) -> tuple[str, int]:
        """`text` without blanks to strip, and how many may be stripped after it."""
        content = self._tokens.steps.strip_content
        count = 0
        while count < min(self._num_strip_left, len(text)) and text[count] == content:
            count += 1
        return text[count:], self._num_strip_left - count if count == len(text) else 0


class ByteLevelDecoder(IncrementalDecoder):
    """Joins the bytes of all tokens and reads them as UTF-8. Every token's text is known at once.

    Broken bytes become U+FFFD as in the Unicode Standard 3.9 ("substitution of maximal subparts"),
    which Rust's from_utf8_lossy and Python's "replace" both follow.
    """

    def __init__(
        self, tokens: TokenBytes, pieces: list[Piece], prompt_token_ids: Sequence[int]
    ) -> None:
        self._unfinished = b""
        super().__init__(tokens, pieces, prompt_token_ids)

    def decode(self, token_id: int) -> list[str]:
        pieces = self._pieces
        piece = pieces[token_id] if token_id < len(pieces) else None
        if not piece:
            return [""]
        if type(piece) is str and not self._unfinished:
            text = piece
        else:
            data = self._unfinished + (piece.encode() if isinstance(piece, str) else piece)
            text, num_read = utf_8_decode(data, "replace", False)
            self._unfinished = data[num_read:]
        return [self._pass_edge(text) if self._at_edge else text]

    def flush(self) -> tuple[list[str], str]:
        text = self._pass_edge(self._unfinished_text())
        self._unfinished = b""
        return [], text

    @property
    def has_unfinished_character(self) -> bool:
        return bool(self._unfinished)

    def _reset(self) -> None:
        self._unfinished = b""

    def _tail_start(self, token_ids: Sequence[int]) -> int:
        # The byte that begins a character says so itself: no more than its bytes matter.
        index = len(token_ids)
        num_bytes = 0
        while index and num_bytes < _MAX_UNFINISHED_BYTES:
            index -= 1
            num_bytes += len(self._piece(token_ids[index]) or b"")
        return index

    def _unfinished_text(self) -> str:
        return utf_8_decode(self._unfinished, "replace", True)[0]

    def _own_prompt(self) -> None:
        return


class ByteFallbackDecoder(IncrementalDecoder):
    """Joins texts; a run of byte tokens is text if the whole run is UTF-8, else U+FFFD per byte.

    So the text of a run is known when the run ends, or when it can no more become UTF-8: from then
    on each of its bytes is a U+FFFD at once. Until then its tokens are held, which is the least
    that is exact, since any next byte may still break the run. Texts alone are never held.
    """

    def __init__(
        self, tokens: TokenBytes, pieces: list[Piece], prompt_token_ids: Sequence[int]
    ) -> None:
        # Texts of the run's tokens if it proves to be UTF-8; None for a token that adds nothing.
        self._run: list[str | None] = []
        self._unfinished = b""
        self._in_broken_run = False
        self._num_prompt_tokens_in_run = 0
        super().__init__(tokens, pieces, prompt_token_ids)

    def decode(self, token_id: int) -> list[str]:
        pieces = self._pieces
        piece = pieces[token_id] if token_id < len(pieces) else None
        if isinstance(piece, bytes):
            return self._decode_byte(piece)
        if self._run:
            if piece is None:
                # Not even a token to the decoder: the run goes on.
                self._run.append(None)
                return []
            return self._end_run(piece)
        if piece is None:
            return [""]
        self._in_broken_run = False
        if self._at_edge:
            if self._drops_first:
                piece, self._drops_first = self._tokens.first_piece(token_id), False
            piece = self._pass_edge(piece)
        return [piece]

    def flush(self) -> tuple[list[str], str]:
        if len(self._run) == self._num_prompt_tokens_in_run:
            # All of it is the prompt's, so all of it is in decode(prompt).
            return [], ""
        return self._end_run(), ""

    @property
    def has_unfinished_character(self) -> bool:
        return False

    def _decode_byte(self, byte: bytes) -> list[str]:
        if self._in_broken_run:
            return [self._pass_edge(REPLACEMENT) if self._at_edge else REPLACEMENT]
        data = self._unfinished + byte
        try:
            text, num_read = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._run.append("")
            self._unfinished = data
            texts = self._end_run()
            self._in_broken_run = True
            return texts
        self._run.append(text)
        self._unfinished = data[num_read:]
        return []

    def _end_run(self, *following: str) -> list[str]:
        """Texts of the run's tokens, and of the token after it, if one is given."""
        texts = [*self._run_texts(), *following]
        if self._at_edge:
            texts = [self._pass_edge(text) for text in texts]
        if num_prompt := self._num_prompt_tokens_in_run:
            # Text that the output gave the prompt's bytes goes to the output's first token.
            texts[num_prompt] = "".join(texts[: num_prompt + 1])
            del texts[:num_prompt]
        self._reset()
        return texts

    def _run_texts(self) -> list[str]:
        if not self._unfinished:
            return [text or "" for text in self._run]
        return ["" if text is None else REPLACEMENT for text in self._run]

    def _reset(self) -> None:
        self._run = []
        self._unfinished = b""
        self._in_broken_run = False
        self._num_prompt_tokens_in_run = 0

    def _tail_start(self, token_ids: Sequence[int]) -> int:
        index = len(token_ids)
        while index and not isinstance(self._piece(token_ids[index - 1]), str):
            index -= 1
        return index

    def _unfinished_text(self) -> str:
        return "".join(self._run_texts())

    def _own_prompt(self) -> None:
        self._num_prompt_tokens_in_run = len(self._run)


def _common_prefix_length(first: str, second: str) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def make_decoder(
    tokens: TokenBytes,
    skip_special_tokens: bool,
    prompt_token_ids: Sequence[int],
    shown_control_tokens: Sequence[str] = (),
) -> IncrementalDecoder:
    """The decoder of a sequence that goes on after `prompt_token_ids`.

    Control tokens whose texts are in `shown_control_tokens` are not skipped.
    """
    pieces = tokens.decoding_pieces(skip_special_tokens, shown_control_tokens)
    if tokens.steps.joining is Joining.BYTE_LEVEL:
        return ByteLevelDecoder(tokens, pieces, prompt_token_ids)
    return ByteFallbackDecoder(tokens, pieces, prompt_token_ids)
