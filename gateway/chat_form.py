"""How one chat completion looks on the wire, in chunks or whole."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gateway.answers import AnswerForm, ChunkTail, prompt_logprobs_json, usage_json
from gateway.chat_choice import ChatChoice, ChatDelta, ChatReader
from gateway.chat_events import CallArguments, CallStart, ChatEvent, ContentPiece, ReasoningPiece
from gateway.chat_reducer import TextReading
from gateway.generation import Usage
from gateway.lanes import LineModel
from gateway.openai_schema import ChatCompletionRequest
from gateway.sse import event, json_text
from protos.detok.v1 import detok_pb2


class ChatForm(AnswerForm[ChatChoice]):
    """The form of one request. Chunks and the whole are made of the events of ChatReaders."""

    def __init__(
        self,
        request_id: str,
        model: LineModel,
        body: ChatCompletionRequest,
        reading: TextReading | None = None,
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._common = {
            "created": int(time.time()),
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
        # Choices whose content is not null any more.
        self._with_content: set[int] = set()
        # What is the same in every chunk is encoded once: a chunk is a concatenation.
        head = msgspec.json.encode(self._object("chat.completion.chunk"))
        self._head = b"data: " + head.removesuffix(b"}") + b',"choices":[{"index":'
        self._tail = ChunkTail(body)

    def begin(self, *, in_reasoning: bool) -> None:
        self._in_reasoning = in_reasoning

    def new_choice(self) -> ChatChoice:
        return ChatChoice(self._new_reader())

    def has_calls(self, index: int) -> bool:
        return index in self._readers and self._readers[index].has_calls

    def output_events(self, index: int, output: detok_pb2.Output, usage: Usage) -> bytes:
        is_first = index not in self._readers
        if is_first:
            self._readers[index] = self._new_reader()
        elif self._is_plain and not output.logprobs and not output.HasField("finish"):
            return self._plain_event(index, output.text, usage)
        reader = self._readers[index]
        delta = reader.read(output)
        deltas = self._deltas(index, delta, is_first=is_first)
        logprobs = msgspec.json.encode(_logprobs(delta.logprobs)) if delta.logprobs else b"null"
        head, tail = self._head + str(index).encode() + b',"delta":{', self._tail(usage)
        events: list[bytes] = []
        for encoded in deltas:
            events += (head, encoded, b'},"logprobs":', logprobs, b',"finish_reason":null', tail)
            logprobs = b"null"
        if delta.finish_reason is not None:
            reason = delta.finish_reason.encode()
            events += (head, b'},"logprobs":null,"finish_reason":"', reason, b'"', tail)
        return b"".join(events)

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

    def _new_reader(self) -> ChatReader:
        return ChatReader(self._reading, in_reasoning=self._in_reasoning)

    def _deltas(self, index: int, delta: ChatDelta, *, is_first: bool) -> list[bytes]:
        """The insides of the chunks' `delta`, one for each chunk."""
        events = list(delta.events)
        if self._is_plain and not events and (is_first or delta.logprobs):
            events.append(ContentPiece(""))
        if _has_content(events):
            self._with_content.add(index)
        is_without = index not in self._with_content and not self.has_calls(index)
        if is_without and delta.finish_reason is not None:
            # As in a whole answer, content is null only beside calls.
            events.append(ContentPiece(""))
        deltas = [_delta(event) for event in events]
        if is_first:
            role = b'"role":"assistant",'
            if not events or not isinstance(events[0], ContentPiece):
                role += b'"content":null' + (b"," if events else b"")
            deltas[:1] = [role + b"".join(deltas[:1])]
        return deltas or ([b""] if delta.logprobs else [])

    def _object(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._common}


def _has_content(events: Iterable[ChatEvent]) -> bool:
    return any(isinstance(event, ContentPiece) for event in events)


def _delta(event: ChatEvent) -> bytes:
    """The inside of a chunk's `delta`."""
    match event:
        case ContentPiece(text):
            return b'"content":' + json_text(text)
        case ReasoningPiece(text):
            return b'"reasoning_content":' + json_text(text)
        case CallStart(index, call_id, name):
            call = {"index": index, **_call(call_id, name, "")}
            return b'"tool_calls":' + msgspec.json.encode([call])
        case CallArguments(index, text):
            head = b'"tool_calls":[{"index":%d,"function":{"arguments":' % index
            return head + json_text(text) + b"}}]"


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
