"""One choice of a chat: what each output adds to it, and all of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.answer_form import finish_reason
from gateway.chat_events import CallArguments, CallStart, ChatEvent, ContentPiece, ReasoningPiece
from gateway.chat_reducer import ChatReducer, TextReading
from protos.detok.v1 import detok_pb2


class ChatDelta(NamedTuple):
    """What one output adds. `finish_reason` is None while the choice goes on."""

    events: Sequence[ChatEvent]
    logprobs: Sequence[detok_pb2.TokenLogprobs]
    finish_reason: str | None


class ChatReader:
    """Reads the outputs of one choice, in order. key: what the ids of its calls are made from."""

    def __init__(self, reading: TextReading, key: str, *, in_reasoning: bool) -> None:
        # Plain text needs no reading.
        self._reducer = (
            None if reading.is_plain else ChatReducer(reading, key, in_reasoning=in_reasoning)
        )

    @property
    def has_calls(self) -> bool:
        return self._reducer is not None and self._reducer.has_calls

    def read(self, output: detok_pb2.Output) -> ChatDelta:
        reason = finish_reason(output)
        if self._reducer is None:
            events: list[ChatEvent] = [ContentPiece(output.text)] if output.text else []
            return ChatDelta(events, output.logprobs, reason)
        events = self._reducer.feed(output.text)
        if reason is not None:
            events += self._reducer.end()
            if reason == "stop" and self._reducer.has_calls:
                reason = "tool_calls"
        return ChatDelta(events, output.logprobs, reason)


@dataclass(slots=True)
class ToolCall:
    """One call; `arguments` is JSON text as the model wrote it, in pieces."""

    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class ChatChoice:
    """One choice of a whole answer, as it grows."""

    def __init__(self, reader: ChatReader) -> None:
        self._reader = reader
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.logprobs: list[detok_pb2.TokenLogprobs] = []
        self.prompt_logprobs: list[detok_pb2.TokenLogprobs] = []
        self.finish_reason: str | None = None

    @property
    def content(self) -> str | None:
        """The answer's text; None where there are calls and nothing else."""
        return "".join(self._content) if self._content or not self.calls else None

    @property
    def reasoning(self) -> str | None:
        return "".join(self._reasoning) or None

    def add(self, output: detok_pb2.Output) -> None:
        delta = self._reader.read(output)
        for event in delta.events:
            self._add_event(event)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.finish_reason = delta.finish_reason

    def _add_event(self, event: ChatEvent) -> None:
        match event:
            case ContentPiece(text):
                self._content.append(text)
            case ReasoningPiece(text):
                self._reasoning.append(text)
            case CallStart(_, call_id, name):
                self.calls.append(ToolCall(call_id, name))
            case CallArguments(index, text):
                self.calls[index].arguments.append(text)
