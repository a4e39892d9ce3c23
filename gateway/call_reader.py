"""Reads one tool call, `{"name": …, "arguments": {…}}`, while its text still comes."""

import json
import re
from collections.abc import Callable, Collection
from enum import Enum
from typing import Final

_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_PLAIN_IN_STRING: Final = re.compile(r'[^"\\]*')
_PLAIN_IN_CONTAINER: Final = re.compile(r'[^"{}\[\]]*')
_SCALAR: Final = re.compile(r"[^ \t\r\n,{}\[\]\"]*")
_ARGUMENT_KEYS: Final = ("arguments", "parameters")

# Takes the text and an index into it; returns the index behind what it took.
_Step = Callable[[str, int], int]


class Reading(Enum):
    OPEN = "open"
    DONE = "done"
    MALFORMED = "malformed"


class CallReader:
    """Takes text as it comes, in pieces of any size; what it says does not depend on the pieces.

    `name` is set once the call has begun: its function is one of `names` and its arguments are an
    object, whose text `take_arguments` hands out as it comes. The object's members may stand in any
    order; others than these are skipped. A call that is done without arguments has none: its name
    is set and its arguments are `{}`. Inside the arguments only strings and brackets are watched,
    so their text can be JSON that is wrong, as the model wrote it.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.state = Reading.OPEN
        self.name: str | None = None
        self._names = names
        self._step: _Step = self._object_start
        self._known_name: str | None = None
        self._key = ""
        self._string: list[str] = []
        self._after_string: Callable[[str], None] = self._key_done
        self._escaped = False
        self._in_string = False
        self._depth = 0
        self._arguments: list[str] = []
        self._has_arguments = False
        self._in_arguments = False

    def read(self, text: str, start: int = 0) -> int:
        """Reads on from `start`; returns the index behind what belongs to the call."""
        index = start
        while index < len(text) and self.state is Reading.OPEN:
            index = self._step(text, index)
        return index

    def take_arguments(self) -> str:
        """The text of the arguments since the last call of this; empty before the call has begun.

        It is complete when `state` is no more OPEN.
        """
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _object_start(self, text: str, index: int) -> int:
        return self._expect(text, index, {"{": self._first_key})

    def _first_key(self, text: str, index: int) -> int:
        return self._expect(text, index, {'"': self._key_string, "}": None})

    def _next_key(self, text: str, index: int) -> int:
        return self._expect(text, index, {'"': self._key_string})

    def _colon(self, text: str, index: int) -> int:
        return self._expect(text, index, {":": self._value_start})

    def _after_value(self, text: str, index: int) -> int:
        return self._expect(text, index, {",": self._next_key, "}": None})

    def _expect(self, text: str, index: int, steps: "dict[str, _Step | None]") -> int:
        """Takes blanks and one of the characters in `steps`; None ends the object."""
        index = _skip(_BLANKS, text, index)
        if index == len(text):
            return index
        if text[index] not in steps:
            self.state = Reading.MALFORMED
            return index
        step = steps[text[index]]
        if step is None:
            self._end()
        else:
            self._step = step
        return index + 1

    def _key_string(self, text: str, index: int) -> int:
        self._after_string = self._key_done
        return self._string_rest(text, index)

    def _key_done(self, key: str) -> None:
        self._key, self._step = key, self._colon

    def _value_start(self, text: str, index: int) -> int:
        index = _skip(_BLANKS, text, index)
        if index == len(text):
            return index
        first = text[index]
        if self._key == "name" and self._known_name is None:
            self._after_string = self._name_done
            return self._expect(text, index, {'"': self._string_rest})
        if self._key in _ARGUMENT_KEYS and not self._has_arguments:
            if first != "{":
                self.state = Reading.MALFORMED
                return index
            self._has_arguments = self._in_arguments = True
            self._begin()
        if first in "{[":
            self._step = self._container
        elif first == '"':
            self._after_string = self._value_done
            self._step = self._string_rest
            return index + 1
        else:
            self._step = self._scalar
        return index

    def _string_rest(self, text: str, index: int) -> int:
        """Takes what is left of a string up to its closing quote."""
        self._step = self._string_rest
        start = index
        while index < len(text):
            if self._escaped:
                self._escaped = False
                index += 1
                continue
            index = _skip(_PLAIN_IN_STRING, text, index)
            if index == len(text):
                break
            if text[index] == '"':
                self._string.append(text[start:index])
                self._end_string()
                return index + 1
            self._escaped = True
            index += 1
        self._string.append(text[start:index])
        return index

    def _end_string(self) -> None:
        raw = "".join(self._string)
        self._string.clear()
        try:
            value = json.loads(f'"{raw}"', strict=False)
        except ValueError:
            self.state = Reading.MALFORMED
        else:
            self._after_string(value)

    def _name_done(self, name: str) -> None:
        self._step = self._after_value
        if name not in self._names:
            self.state = Reading.MALFORMED
            return
        self._known_name = name
        self._begin()

    def _begin(self) -> None:
        if self._has_arguments:
            self.name = self._known_name

    def _value_done(self, value: str) -> None:
        self._step = self._after_value

    def _scalar(self, text: str, index: int) -> int:
        end = _skip(_SCALAR, text, index)
        if end < len(text):
            self._step = self._after_value
        return end

    def _container(self, text: str, index: int) -> int:
        """Takes what is left of an object or list, up to the bracket that closes it."""
        start = index
        while index < len(text):
            index = self._container_step(text, index)
            if not self._depth and not self._in_string:
                self._step = self._after_value
                break
        if self._in_arguments:
            self._arguments.append(text[start:index])
            self._in_arguments = self._step == self._container
        return index

    def _container_step(self, text: str, index: int) -> int:
        if self._escaped:
            self._escaped = False
            return index + 1
        index = _skip(_PLAIN_IN_STRING if self._in_string else _PLAIN_IN_CONTAINER, text, index)
        if index == len(text):
            return index
        character = text[index]
        if character == '"':
            self._in_string = not self._in_string
        elif character == "\\":
            self._escaped = True
        elif character in "{[":
            self._depth += 1
        else:
            self._depth -= 1
        return index + 1

    def _end(self) -> None:
        if self._known_name is None:
            self.state = Reading.MALFORMED
            return
        self.state = Reading.DONE
        if not self._has_arguments:
            self.name = self._known_name
            self._arguments.append("{}")


def _skip(pattern: re.Pattern[str], text: str, index: int) -> int:
    match = pattern.match(text, index)
    assert match is not None
    return match.end()
