"""Builds one response of the Responses API, and the events that tell how it grew."""

import time
from typing import Any, Final

from gateway.chat_choice import ChatDelta
from gateway.chat_events import CallArguments, CallStart, ChatEvent, ContentPiece, ReasoningPiece
from gateway.sse import event
from gateway.usage import Usage
from protos.detok.v1 import detok_pb2
from protos.wire.errors import RequestCancelled, TokenlineError

Item = dict[str, Any]

# The status that each finish reason leads to, and why it is incomplete.
_ENDS: Final = {
    "stop": ("completed", None),
    "tool_calls": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "timeout": ("incomplete", "timeout"),
    "cancelled": ("cancelled", None),
}

_ITEM_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseBuilder:
    """`response` is the object so far. Every method returns the events that it causes, encoded.

    num_events: how many were told of it before.
    """

    def __init__(self, response: dict[str, Any], num_events: int = 0) -> None:
        self.response = response
        self._num_events = num_events
        # The last item while it grows, and what it has of text or arguments.
        self._open: Item | None = None
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._num_reasoning_tokens = 0

    def begin(self) -> bytes:
        self.response["status"] = "in_progress"
        return self._whole("response.created") + self._whole("response.in_progress")

    def add(self, delta: ChatDelta, num_tokens: int) -> bytes:
        """num_tokens: sampled for this delta."""
        if delta.events and all(isinstance(event, ReasoningPiece) for event in delta.events):
            self._num_reasoning_tokens += num_tokens
        logprobs = [_logprob(entry) for entry in delta.logprobs]
        events = []
        for piece in delta.events:
            events.append(self._add_piece(piece, logprobs))
            logprobs = []
        return b"".join(events)

    def finish(self, finish_reason: str, usage: Usage) -> bytes:
        """The answer is complete; `last_event` is still to be told."""
        status, reason = _ENDS[finish_reason]
        events = self._close("completed" if status == "completed" else "incomplete")
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": reason} if reason is not None else None
        self.response["usage"] = self._usage(usage)
        self.response["completed_at"] = time.time() if status == "completed" else None
        return events

    def fail(self, error: TokenlineError) -> bytes:
        """The answer ends with an error; `last_event` is still to be told."""
        events = self._close("incomplete")
        if isinstance(error, RequestCancelled):
            self.response["status"] = "cancelled"
            return events
        self.response["status"] = "failed"
        self.response["error"] = {"code": error.code or "server_error", "message": error.message}
        return events

    def last_event(self) -> bytes:
        """The whole response with how it ended; a cancelled one has no event of its own."""
        status = self.response["status"]
        return self._whole(f"response.{'incomplete' if status == 'cancelled' else status}")

    def _add_piece(self, piece: ChatEvent, logprobs: list[dict[str, Any]]) -> bytes:
        match piece:
            case ContentPiece(text):
                opened = self._open_item("message", {"role": "assistant", "content": []})
                self._logprobs += logprobs
                delta = {"content_index": 0, "delta": text, "logprobs": logprobs}
                return opened + self._grow("response.output_text.delta", text, delta)
            case ReasoningPiece(text):
                opened = self._open_item("reasoning", {"summary": [], "content": []})
                delta = {"content_index": 0, "delta": text}
                return opened + self._grow("response.reasoning_text.delta", text, delta)
            case CallStart(_, call_id, name):
                closed = self._close("completed")
                call = {"call_id": call_id, "name": name, "arguments": ""}
                return closed + self._open_item("function_call", call)
            case CallArguments(_, text):
                return self._grow("response.function_call_arguments.delta", text, {"delta": text})

    def _open_item(self, kind: str, fields: dict[str, Any]) -> bytes:
        """Begins an item of `kind` unless the open one is of it."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        closed = self._close("completed")
        number = len(self.response["output"])
        item_id = f"{_ITEM_PREFIXES[kind]}_{self.response['id']}_{number}"
        self._open = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self.response["output"].append(self._open)
        opened = closed + self._event("response.output_item.added", {"item": self._open})
        if kind != "function_call":
            opened += self._part_event("response.content_part.added", _part(kind, "", []))
        return opened

    def _grow(self, kind: str, text: str, fields: dict[str, Any]) -> bytes:
        assert self._open is not None
        self._pieces.append(text)
        return self._event(kind, {"item_id": self._open["id"], **fields})

    def _close(self, status: str) -> bytes:
        """Ends the open item, if any."""
        item = self._open
        if item is None:
            return b""
        text, logprobs = "".join(self._pieces), self._logprobs
        self._pieces, self._logprobs = [], []
        item["status"] = status
        place = {"item_id": item["id"]}
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {**place, "name": item["name"], "arguments": text}
            events = self._event("response.function_call_arguments.done", done)
        else:
            part = _part(item["type"], text, logprobs)
            item["content"] = [part]
            done = {**place, "content_index": 0, "text": text}
            if item["type"] == "message":
                done["logprobs"] = logprobs
            events = self._event(f"response.{part['type']}.done", done)
            events += self._part_event("response.content_part.done", part)
        events += self._event("response.output_item.done", {"item": item})
        self._open = None
        return events

    def _part_event(self, kind: str, part: dict[str, Any]) -> bytes:
        assert self._open is not None
        return self._event(kind, {"item_id": self._open["id"], "content_index": 0, "part": part})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        place = {"output_index": len(self.response["output"]) - 1}
        return self._numbered(kind, {**place, **fields})

    def _whole(self, kind: str) -> bytes:
        return self._numbered(kind, {"response": self.response})

    def _numbered(self, kind: str, fields: dict[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\n".encode() + event(body)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(entry: detok_pb2.TokenLogprobs) -> dict[str, Any]:
    return {**_token(entry.token), "top_logprobs": [_token(token) for token in entry.top]}


def _token(token: detok_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text_bytes)}
