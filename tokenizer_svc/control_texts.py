"""Finds where a text holds, or could help to form, the written form of a control token."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

# Marks the end of a control text in the tree; no text has a key longer than one character.
_END: Final = "end"


class ControlTexts:
    """The written forms of a tokenizer's control tokens, such as `<|im_end|>`.

    Built once per process; looking through a text costs a few dictionary look-ups per character
    that begins a control text, whatever their number (Gemma has 6,000).
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted({text for text in texts if text}, key=len, reverse=True)
        # Case is folded, so that a template that changes the case of a text makes none either.
        folded = [_folded(text) for text in self._texts]
        self._tree: dict[str, Any] = {}
        for text in folded:
            node = self._tree
            for character in text:
                node = node.setdefault(character, {})
            node[_END] = True
        self._suffixes = {text[i:] for text in folded for i in range(1, len(text))}
        self._longest_suffix = max(map(len, self._suffixes), default=0)
        # Control texts joined by something that is in none of them: one search finds an infix.
        self._joined = "\0".join(folded)
        self._first = _character_class(text[0] for text in folded)
        self._first_or_last = _character_class(text[i] for text in folded for i in (0, -1))

    def first_in(self, text: str) -> str | None:
        """The longest control text that `text` begins with."""
        return next((control for control in self._texts if text.startswith(control)), None)

    def critical_positions(self, text: str) -> set[int]:
        """The positions whose characters, if changed, keep `text` out of every control text.

        That is: the first character of each control text in it, of an unfinished one at its end,
        and the last character of one at its start whose beginning may come from what stands
        before. A fragment that is a plain word (`end`) is left alone: templates compare such
        words, and it takes signs from elsewhere to make a control text of it.
        """
        if not text:
            return set()
        text = _folded(text)
        positions = set(self._starts(text))
        if self._first_or_last.search(text) is not None:
            for length in range(1, min(self._longest_suffix, len(text)) + 1):
                if text[:length] in self._suffixes and not _is_word(text[:length]):
                    positions.add(length - 1)
        if not positions and not _is_word(text) and text in self._joined:
            positions.add(next(i for i, character in enumerate(text) if not _is_word(character)))
        return positions

    def _starts(self, text: str) -> Iterator[int]:
        """Where a control text begins that is whole, or is cut off by the end of `text`."""
        for match in self._first.finditer(text):
            start = at = match.start()
            node: Mapping[str, Any] = self._tree
            while at < len(text) and (below := node.get(text[at])) is not None:
                node = below
                at += 1
                if _END in node:
                    yield start
                    break
            else:
                if at == len(text) and not _is_word(text[start:]):
                    yield start


def _character_class(characters: Iterable[str]) -> re.Pattern[str]:
    distinct = sorted(set(characters))
    return re.compile(f"[{''.join(map(re.escape, distinct))}]" if distinct else r"(?!)")


def _folded(text: str) -> str:
    """`text` in lower case, of the same length."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(c if len(c.lower()) != 1 else c.lower() for c in text)


def _is_word(text: str) -> bool:
    return re.fullmatch(r"\w+", text) is not None
