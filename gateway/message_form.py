"""How one message of Anthropic's Messages API is answered: as its events, or whole."""

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec

from gateway.answer_form import AnswerForm
from gateway.chat_choice import ChatReader
from gateway.chat_events import CallArguments, CallStart, ChatEvent, ContentPiece, ReasoningPiece
from gateway.chat_reducer import TextReading
from gateway.message_errors import message_error_body
from gateway.sse import event
from gateway.usage import Usage
from protos.detok.v1 import detok_pb2
from protos.wire.errors import TokenlineError

# What was cut off, by whatever limit, is told as such.
_STOP_REASONS: Final = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "timeout": "max_tokens",
    "cancelled": "max_tokens",
}
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class GrowingMessage:
    """The one choice of a whole answer."""

    def __init__(self, form: "MessageForm") -> None:
        self._form = form

    @property
    def finish_reason(self) -> str | None:
        return self._form.finish_reason

    def add(self, output: detok_pb2.Output) -> None:
        self._form.read(output)


class MessageForm(AnswerForm[GrowingMessage]):
    """The form of one request. The whole message is what the events add up to."""

    end_of_stream: ClassVar[bytes] = b""
    ping: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, message_id: str, model: str, reading: TextReading) -> None:
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_details": None,
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._reading = reading
        self._reader = ChatReader(reading, message_id, in_reasoning=False)
        self._has_begun = False
        # The kind of the last block while it grows, and what it has so far.
        self._open = ""
        self._pieces: list[str] = []
        self.finish_reason: str | None = None

    def begin(self, *, in_reasoning: bool) -> None:
        self._reader = ChatReader(self._reading, self._message["id"], in_reasoning=in_reasoning)

    def new_choice(self) -> GrowingMessage:
        return GrowingMessage(self)

    def read(self, output: detok_pb2.Output) -> bytes:
        """Events for what came."""
        delta = self._reader.read(output)
        self.finish_reason = delta.finish_reason
        if output.finish.stop_string:
            self._message["stop_sequence"] = output.finish.stop_string
        return b"".join([self._add(piece) for piece in delta.events])

    def output_events(self, index: int, output: detok_pb2.Output, usage: Usage) -> bytes:
        return self._start(usage) + self.read(output)

    async def last_events(self, usage: Usage) -> bytes:
        events = self._start(usage) + self._finish()
        told = {
            name: self._message[name] for name in ("stop_details", "stop_reason", "stop_sequence")
        }
        events += _event("message_delta", {"delta": told, "usage": _usage(usage)})
        return events + _event("message_stop", {})

    def failure_events(self, error: TokenlineError) -> bytes:
        return b"event: error\n" + event(message_error_body(error))

    async def whole(self, choices: Sequence[GrowingMessage], usage: Usage) -> bytes:
        self._finish()
        return msgspec.json.encode({**self._message, "usage": _usage(usage)})

    def _start(self, usage: Usage) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return _event("message_start", {"message": {**self._message, "usage": _usage(usage)}})

    def _add(self, piece: ChatEvent) -> bytes:
        match piece:
            case ContentPiece(text):
                return self._open_block("text", {"text": ""}) + self._grow(text)
            case ReasoningPiece(text):
                empty = {"thinking": "", "signature": ""}
                return self._open_block("thinking", empty) + self._grow(text)
            case CallStart(_, call_id, name):
                closed = self._close()
                return closed + self._open_block(
                    "tool_use", {"id": call_id, "name": name, "input": {}}
                )
            case CallArguments(_, text):
                return self._grow(text)

    def _open_block(self, kind: str, fields: dict[str, Any]) -> bytes:
        """Begins a block of `kind` unless the open one is of it."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        block = {"type": kind, **fields}
        self._message["content"].append(block)
        return closed + self._block_event("content_block_start", {"content_block": block})

    def _grow(self, text: str) -> bytes:
        self._pieces.append(text)
        kind, field = _DELTAS[self._open]
        return self._block_event("content_block_delta", {"delta": {"type": kind, field: text}})

    def _close(self) -> bytes:
        """Ends the open block, if any."""
        if not self._open:
            return b""
        block, text = self._message["content"][-1], "".join(self._pieces)
        if self._open == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[self._open] = text
        self._open, self._pieces = "", []
        return self._block_event("content_block_stop", {})

    def _finish(self) -> bytes:
        closed = self._close()
        reason = _STOP_REASONS[self.finish_reason or "stop"]
        if reason == "end_turn" and self._message["stop_sequence"] is not None:
            reason = "stop_sequence"
        self._message["stop_reason"] = reason
        return closed

    def _block_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return _event(kind, {"index": len(self._message["content"]) - 1, **fields})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **fields})


def _arguments(text: str) -> dict[str, Any]:
    """The object that the model wrote; what is none is handed on as text."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the rest of the input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
