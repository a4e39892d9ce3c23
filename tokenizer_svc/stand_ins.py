"""Keeps control tokens that a user typed apart from those that the chat template writes.

Before a chat is rendered, each control text inside a user's string has one character replaced by
a private-use character that occurs nowhere in the request: its *stand-in*. The string keeps its
length, and the template sees every other character as it is. In the rendered prompt, control texts
without stand-ins are the template's own; when the prompt is encoded, the stand-ins become the
characters they stand for, with the control tokens around them already settled.

A template that cuts a user's string in pieces and joins the pieces again without anything between
could still form a control text; no template is known that does.
"""

from collections.abc import Iterator
from typing import Any, Final

from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.control_texts import ControlTexts

_PRIVATE_USE: Final = range(0xE000, 0xF900)


class StandIns:
    """The stand-ins of one request. `taken` are the private-use characters it uses itself."""

    def __init__(self, control_texts: ControlTexts, taken: set[str]) -> None:
        self._control_texts = control_texts
        self._free: Iterator[str] = (c for c in map(chr, _PRIVATE_USE) if c not in taken)
        self._by_original: dict[str, str] = {}

    @property
    def originals(self) -> dict[str, str]:
        """The character that each stand-in stands for."""
        return {stand_in: original for original, stand_in in self._by_original.items()}

    def reserve(self) -> str:
        """A private-use character that is nowhere in the request, and will be no stand-in."""
        return self._next_free()

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value with stand-ins in its strings and its objects' keys."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        if isinstance(value, dict):
            return {self._protect_text(key): self.protect(item) for key, item in value.items()}
        return value

    def restore(self, text: str) -> str:
        """`text` with the original characters again."""
        return text.translate({ord(k): original for k, original in self.originals.items()})

    def _protect_text(self, text: str) -> str:
        positions = self._control_texts.critical_positions(text)
        if not positions:
            return text
        characters = list(text)
        for position in positions:
            characters[position] = self._stand_in(characters[position])
        return "".join(characters)

    def _stand_in(self, original: str) -> str:
        if original not in self._by_original:
            self._by_original[original] = self._next_free()
        return self._by_original[original]

    def _next_free(self) -> str:
        character = next(self._free, None)
        if character is None:
            raise ChatRefused("The messages use every private-use character of Unicode.")
        return character


def private_use_characters(text: str) -> set[str]:
    return {c for c in set(text) if ord(c) in _PRIVATE_USE} if not text.isascii() else set()
