"""Finds tool calls in a text while it still comes; what is no call stays text, to the letter."""

import hashlib
import re
from collections.abc import Callable, Collection
from typing import Final

from gateway.call_reader import CallReader, Reading
from gateway.chat_events import CallArguments, CallStart, ChatEvent, ContentPiece
from gateway.tool_call_format import CallFormat

# Characters from a call's first to where its arguments begin. What is longer is text: it bounds
# what is held back, and what is read again when it proves to be no call.
MAX_HEAD_CHARACTERS: Final = 16384

_CALL_ID_BYTES: Final = 12
_BLANKS: Final = re.compile(r"[ \t\r\n]*")
# Small models close one bracket too many, or one too few.
_BLANKS_AND_BRACKETS: Final = re.compile(r"[ \t\r\n}]*")

# Takes new text; returns what it left for the next state.
_State = Callable[[str], str]


class ToolCallParser:
    """Takes text in pieces of any size; the events, joined, do not depend on the pieces.

    A call is told of when its function's name and the beginning of its arguments are there; what
    comes until then is held, and given back as text if it proves to be no call. Blanks next to a
    call are layout and belong to no text. Calls beyond `max_calls` are left out.

    begins_bare: calls may begin the text without their opener, whatever the format. key: what the
    calls' ids are made from, so that whoever reads the text finds the same.
    """

    def __init__(
        self,
        form: CallFormat,
        names: Collection[str],
        key: str,
        *,
        max_calls: int | None = None,
        begins_bare: bool = False,
    ) -> None:
        self._form = form
        self._names = names
        self._key = key
        self._max_calls = max_calls
        self._bare_beginnings = (
            "{" + form.bracket if begins_bare else "{" if form.begins_bare else ""
        )
        self._state: _State = self._text
        self._events: list[ChatEvent] = []
        # Text that may still prove to be either.
        self._held = ""
        self._head: list[str] = []
        self._num_head_characters = 0
        self._at_start = True
        self._after_call = False
        self._in_brackets = False
        self._reader = CallReader(names)
        self.num_calls = 0

    def feed(self, text: str) -> list[ChatEvent]:
        """What is certain now that `text` has come."""
        while text:
            text = self._state(text)
        events, self._events = self._events, []
        return events

    def end(self) -> list[ChatEvent]:
        """What is left when the text has ended."""
        is_in_object = self._state == self._object
        if self._state == self._bracket or (is_in_object and self._reader.name is None):
            self._give_text("".join(self._head))
        elif is_in_object:
            pass  # Its arguments were cut short; all of them were told.
        elif self._state != self._tail and not (self._after_call and not self._held.strip()):
            # What is left in the tail of a call is the beginning of its closing.
            self._give_text(self._held)
        events, self._events = self._events, []
        return events

    def _text(self, text: str) -> str:
        """Outside calls."""
        text, self._held = self._held + text, ""
        blanks = _length(_BLANKS, text)
        if self._at_start and self._bare_beginnings:
            if blanks == len(text):
                self._held = text
                return ""
            is_opener = self._form.opener.startswith(text[blanks : blanks + len(self._form.opener)])
            if text[blanks] in self._bare_beginnings and not is_opener:
                return self._begin_group(text[:blanks], text[blanks:])
        index = text.find(self._form.opener)
        if index >= 0:
            end = index + len(self._form.opener)
            blanks_start = _trailing_blanks(text, index)
            if blanks_start:
                self._give_text(text[:blanks_start])
            return self._begin_group(text[blanks_start:end], text[end:])
        held_from = _trailing_blanks(text, len(text) - _partial_length(text, self._form.opener))
        self._held = text[held_from:]
        if held_from:
            self._give_text(text[:held_from])
        return ""

    def _begin_group(self, opening: str, rest: str) -> str:
        self._in_brackets = False
        self._hold_head(opening)
        self._state = self._bracket if self._form.bracket else self._begin_object()
        return rest

    def _hold_head(self, text: str) -> None:
        self._head = [text]
        self._num_head_characters = len(text)

    def _bracket(self, text: str) -> str:
        """After the opener, where a bracket may stand before the first call."""
        blanks = _length(_BLANKS, text)
        end = blanks
        if end < len(text) and text[end] == self._form.bracket:
            self._in_brackets = True
            end += 1
        self._head.append(text[:end])
        self._num_head_characters += end
        if self._num_head_characters > MAX_HEAD_CHARACTERS:
            return self._give_up(text[end:])
        if blanks < len(text):
            self._state = self._begin_object()
        return text[end:]

    def _begin_object(self) -> _State:
        self._reader = CallReader(self._names)
        return self._object

    def _object(self, text: str) -> str:
        """In a call."""
        reader = self._reader
        if reader.name is not None:
            end = reader.read(text)
        else:
            # No more at a time than may be held: what is a call must not hang on the pieces.
            end = reader.read(text[: max(0, MAX_HEAD_CHARACTERS - self._num_head_characters)])
            self._head.append(text[:end])
            self._num_head_characters += end
            if reader.name is not None:
                self._begin_call(reader.name)
            elif (
                reader.state is not Reading.OPEN or self._num_head_characters >= MAX_HEAD_CHARACTERS
            ):
                return self._give_up(text[end:])
        if arguments := reader.take_arguments():
            self._give_call(CallArguments(self.num_calls - 1, arguments))
        if reader.state is not Reading.OPEN:
            self._held = ""
            self._state = self._tail
        return text[end:]

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self._after_call = True
        self._at_start = False
        index = self.num_calls - 1
        self._give_call(CallStart(index, _call_id(f"{self._key}:{index}"), name))

    def _tail(self, text: str) -> str:
        """After a call: the closer, or a separator and the next call, or text after all."""
        form = self._form
        text, self._held = self._held + text, ""
        blanks = _length(_BLANKS_AND_BRACKETS, text)
        rest = text[blanks:]
        if form.separator and rest.startswith(form.separator):
            end = blanks + len(form.separator)
            self._hold_head(text[:end])
            self._state = self._begin_object()
            return text[end:]
        closer = form.closer if self._in_brackets or not form.bracket else ""
        if closer and rest.startswith(closer):
            self._state = self._text
            return rest[len(closer) :]
        if not rest or closer.startswith(rest):
            self._held = text
            return ""
        self._state = self._text
        return text

    def _give_up(self, rest: str) -> str:
        """The head is no call. It is looked through again, but for its first character."""
        text = "".join(self._head) + rest
        end = _length(_BLANKS, text) + 1
        self._give_text(text[:end])
        self._state = self._text
        return text[end:]

    def _give_text(self, text: str) -> None:
        if text:
            self._at_start = self._after_call = False
            self._events.append(ContentPiece(text))

    def _give_call(self, event: CallStart | CallArguments) -> None:
        if self._max_calls is None or event.index < self._max_calls:
            self._events.append(event)


def _call_id(key: str) -> str:
    return f"call_{hashlib.blake2b(key.encode(), digest_size=_CALL_ID_BYTES).hexdigest()}"


def _length(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    assert match is not None
    return match.end()


def _trailing_blanks(text: str, end: int) -> int:
    """Where the blanks that end at `end` begin."""
    return len(text[:end].rstrip(" \t\r\n"))


def _partial_length(text: str, word: str) -> int:
    """The length of the longest end of `text` with which `word` begins, short of all of it."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
