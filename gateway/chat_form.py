"""How one chat completion looks on the wire, in chunks or whole."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gateway.answer_form import AnswerForm, ChunkTail, prompt_logprobs_json, usage_json
from gateway.call import Call
from gateway.chat_choice import ChatChoice, ChatDelta, ChatReader
from gateway.chat_events import CallArguments, CallStart, ChatEvent, ContentPiece, ReasoningPiece
from gateway.chat_reducer import TextReading
from gateway.lanes import LineModel
from gateway.openai_schema import ChatCompletionRequest
from gateway.sse import event, json_text
from gateway.usage import Usage
from protos.detok.v1 import detok_pb2


class ChatForm(AnswerForm[ChatChoice]):
    """The form of one request. Chunks and the whole are made of the events of ChatReaders."""

    has_event_ids = True

    def __init__(
        self,
        call: Call,
        model: LineModel,
        body: ChatCompletionRequest,
        reading: TextReading | None = None,
    ) -> None:
        self._request_id = call.request_id
        self._common = {
            "created": call.created,
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        self._reading = reading or TextReading()
        self._is_plain = self._reading.is_plain
        self._in_reasoning = False
        self._has_logprobs = bool(body.logprobs)
        self._has_usage = body.include_usage
        self._num_top_prompt_logprobs = body.prompt_logprobs
        self._readers: dict[int, ChatReader] = {}
        self._num_choices = 0
        # Choices whose content is not null any more.
        self._with_content: set[int] = set()
        # What is the same in every chunk is encoded once: a chunk is a concatenation.
        head = msgspec.json.encode(self._object("chat.completion.chunk"))
        self._head = b"data: " + head.removesuffix(b"}") + b',"choices":[{"index":'
        self._tail = ChunkTail(body)

    def begin(self, *, in_reasoning: bool) -> None:
        self._in_reasoning = in_reasoning

    def new_choice(self) -> ChatChoice:
        self._num_choices += 1
        return ChatChoice(self._new_reader(self._num_choices - 1))

    def output_events(self, index: int, output: detok_pb2.Output, usage: Usage) -> bytes:
        is_first = index not in self._readers
        if is_first:
            self._readers[index] = self._new_reader(index)
        elif self._is_plain and not output.logprobs and not output.HasField("finish"):
            return self._plain_event(index, output.text, usage)
        delta = self._readers[index].read(output)
        inside = self._delta(index, delta, is_first=is_first)
        if not inside and not delta.logprobs and delta.finish_reason is None:
            return b""
        return b'%b%d,"delta":{%b},"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            inside,
            msgspec.json.encode(_logprobs(delta.logprobs)) if delta.logprobs else b"null",
            b"null" if delta.finish_reason is None else json_text(delta.finish_reason),
            self._tail(usage),
        )

    async def last_events(self, usage: Usage) -> bytes:
        if not self._has_usage:
            return b""
        chunk = self._object("chat.completion.chunk")
        return event({**chunk, "choices": [], "usage": usage_json(usage)})

    async def whole(self, choices: Sequence[ChatChoice], usage: Usage) -> bytes:
        prompt_logprobs = {}
        if self._num_top_prompt_logprobs is not None:
            # One prompt, so that those of any choice are those of the request.
            entries = prompt_logprobs_json(
                choices[0].prompt_logprobs, self._num_top_prompt_logprobs
            )
            prompt_logprobs = {"prompt_logprobs": entries}
        return msgspec.json.encode(
            {
                **self._object("chat.completion"),
                **prompt_logprobs,
                "choices": [
                    {
                        "index": index,
                        "message": _message(choice),
                        "logprobs": _logprobs(choice.logprobs) if self._has_logprobs else None,
                        "finish_reason": choice.finish_reason,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": usage_json(usage),
            }
        )

    def _plain_event(self, index: int, text: str, usage: Usage) -> bytes:
        """What an output comes to that is nothing but text: by far the most common, so at once."""
        if not text:
            return b""
        end = b'},"logprobs":null,"finish_reason":null' + self._tail(usage)
        return b'%b%d,"delta":{"content":%b%b' % (self._head, index, json_text(text), end)

    def _new_reader(self, index: int) -> ChatReader:
        key = f"{self._request_id}:{index}"
        return ChatReader(self._reading, key, in_reasoning=self._in_reasoning)

    def _delta(self, index: int, delta: ChatDelta, *, is_first: bool) -> bytes:
        """The inside of the chunk's `delta`."""
        content = [piece.text for piece in delta.events if isinstance(piece, ContentPiece)]
        thoughts = [piece.text for piece in delta.events if isinstance(piece, ReasoningPiece)]
        calls = _call_deltas(delta.events)
        is_bare = self._is_plain and (is_first or bool(delta.logprobs))
        # As in a whole answer, content is null only beside calls.
        is_without = delta.finish_reason is not None and not (
            index in self._with_content or self._readers[index].has_calls
        )
        if not content and (is_bare or is_without):
            content = [""]
        if content:
            self._with_content.add(index)
        parts = [b'"role":"assistant"'] if is_first else []
        if content:
            parts.append(b'"content":' + json_text("".join(content)))
        elif is_first:
            parts.append(b'"content":null')
        if thoughts:
            parts.append(b'"reasoning_content":' + json_text("".join(thoughts)))
        if calls:
            parts.append(b'"tool_calls":' + msgspec.json.encode(calls))
        return b",".join(parts)

    def _object(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self._request_id}", "object": kind, **self._common}


def _call_deltas(events: Iterable[ChatEvent]) -> list[dict[str, Any]]:
    """A chunk's `tool_calls`: what each call gained, as one entry."""
    deltas: dict[int, dict[str, Any]] = {}
    for piece in events:
        if isinstance(piece, CallStart):
            call = _call(piece.call_id, piece.name, "")
            deltas[piece.index] = {"index": piece.index, **call}
        elif isinstance(piece, CallArguments):
            gained = deltas.setdefault(
                piece.index, {"index": piece.index, "function": {"arguments": ""}}
            )
            gained["function"]["arguments"] += piece.text
    return list(deltas.values())


def _message(choice: ChatChoice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            _call(call.call_id, call.name, "".join(call.arguments)) for call in choice.calls
        ]
    return message


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _logprobs(tokens: Iterable[detok_pb2.TokenLogprobs]) -> dict[str, Any]:
    return {
        "content": [
            {**_token(entry.token), "top_logprobs": [_token(token) for token in entry.top]}
            for entry in tokens
        ],
        "refusal": None,
    }


def _token(token: detok_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text_bytes)}
