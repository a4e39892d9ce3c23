"""Turns one choice's text into events: thoughts, answer and tool calls told apart as they come.

The only way from text to an answer: streams send the events, whole answers add them up.
"""

from dataclasses import dataclass

from gateway.chat_events import ChatEvent, ContentPiece, joined_events
from gateway.reasoning import ReasoningSplitter
from gateway.tool_call_format import CallFormat
from gateway.tool_call_parser import ToolCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReading:
    """How the text of a request's choices is to be read.

    `call_format` None: tool calls are not looked for. `tool_names`: the functions that may be
    called. `max_calls`: None for any number. `begins_bare`: calls may begin the text without their
    opener, whatever the format.
    """

    has_reasoning: bool = False
    call_format: CallFormat | None = None
    tool_names: frozenset[str] = frozenset()
    max_calls: int | None = None
    begins_bare: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the text is the answer, as it is."""
        return not self.has_reasoning and self.call_format is None


class ChatReducer:
    """Reads one choice. in_reasoning: the prompt ends with the opener of thoughts.

    key: of the choice, among all requests; the ids of its calls are made from it.
    """

    def __init__(self, reading: TextReading, key: str, *, in_reasoning: bool = False) -> None:
        self._reasoning = ReasoningSplitter(opened=in_reasoning) if reading.has_reasoning else None
        self._calls = (
            ToolCallParser(
                reading.call_format,
                reading.tool_names,
                key,
                max_calls=reading.max_calls,
                begins_bare=reading.begins_bare,
            )
            if reading.call_format is not None
            else None
        )

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def feed(self, text: str) -> list[ChatEvent]:
        """What is certain now that `text` has come."""
        events: list[ChatEvent] = []
        if self._reasoning is not None:
            thoughts, text = self._reasoning.feed(text)
            events += thoughts
        return joined_events(events + self._answer(text))

    def end(self) -> list[ChatEvent]:
        """What is left when the text has ended."""
        events: list[ChatEvent] = []
        if self._reasoning is not None:
            thoughts, text = self._reasoning.end()
            events += thoughts
            events += self._answer(text)
        if self._calls is not None:
            events += self._calls.end()
        return joined_events(events)

    def _answer(self, text: str) -> list[ChatEvent]:
        if not text:
            return []
        return [ContentPiece(text)] if self._calls is None else self._calls.feed(text)
