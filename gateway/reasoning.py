"""Tells what a model thinks aloud, between <think> and </think>, from its answer."""

from typing import Final

from gateway.chat_events import ReasoningPiece

OPENER: Final = "<think>"
CLOSER: Final = "</think>"
_BLANKS: Final = " \t\r\n"


class ReasoningSplitter:
    """Takes text in pieces of any size; what comes out, joined, does not depend on the pieces.

    Thoughts stand before the answer, or nowhere. Blanks at both ends of them, and before the answer
    that follows them, are layout. opened: the prompt ends with the opener.
    """

    def __init__(self, *, opened: bool) -> None:
        self._is_open = opened
        self._may_open = True
        self._is_over = False
        self._has_begun = False
        self._has_answer = False
        self._held = ""

    def feed(self, text: str) -> tuple[list[ReasoningPiece], str]:
        """The thoughts and the answer's text that are certain now."""
        if self._has_answer:
            return [], text
        text, self._held = self._held + text, ""
        if self._may_open:
            shown = text.lstrip(_BLANKS)
            if len(shown) < len(OPENER) and OPENER.startswith(shown):
                self._held = text
                return [], ""
            self._may_open = False
            if shown.startswith(OPENER):
                self._is_open = True
                text = shown[len(OPENER) :]
            if not self._is_open:
                self._is_over = self._has_answer = True
                return [], text
        if self._is_over:
            return [], self._after(text)
        return self._thoughts(text)

    def end(self) -> tuple[list[ReasoningPiece], str]:
        """What is left when the text has ended."""
        held, self._held = self._held, ""
        if self._is_open and not self._is_over:
            thoughts = held.rstrip(_BLANKS) if self._has_begun else held.strip(_BLANKS)
            return ([ReasoningPiece(thoughts)] if thoughts else []), ""
        # Blanks after the thoughts are no answer; those of a text without thoughts are.
        return [], "" if self._is_over else held

    def _thoughts(self, text: str) -> tuple[list[ReasoningPiece], str]:
        if not self._has_begun:
            text = text.lstrip(_BLANKS)
            self._has_begun = bool(text)
        index = text.find(CLOSER)
        if index >= 0:
            self._is_over = True
            thoughts = text[:index].rstrip(_BLANKS)
            answer = self._after(text[index + len(CLOSER) :])
            return ([ReasoningPiece(thoughts)] if thoughts else []), answer
        certain = text[: len(text) - _partial_closer_length(text)].rstrip(_BLANKS)
        self._held = text[len(certain) :]
        return ([ReasoningPiece(certain)] if certain else []), ""

    def _after(self, text: str) -> str:
        """The answer, from its first character that is no blank."""
        if not text.strip(_BLANKS):
            self._held = text
            return ""
        self._has_answer = True
        return text.lstrip(_BLANKS)


def _partial_closer_length(text: str) -> int:
    for length in range(min(len(text), len(CLOSER) - 1), 0, -1):
        if text.endswith(CLOSER[:length]):
            return length
    return 0
