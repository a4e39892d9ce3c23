"""POST /v1/chat/completions: from the body to a job, from outputs to chunks and the answer."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import (
    Choice,
    ChunkTail,
    answer,
    finish_reason,
    prompt_logprobs_json,
    usage_json,
)
from gateway.chat_messages import checked_messages, checked_tools
from gateway.generation import Usage
from gateway.identity import checked_identity
from gateway.job import job_from
from gateway.lanes import Lanes, LineModel
from gateway.openai_schema import ChatCompletionRequest
from gateway.pipeline import Pipeline
from gateway.request_body import decode_body, read_body
from gateway.sse import event, json_text
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2

PATH: Final = "/v1/chat/completions"

_decoder: Final = msgspec.json.Decoder(ChatCompletionRequest)


class ChatCompletions:
    """The endpoint."""

    def __init__(
        self, lanes: Lanes, pipeline: Pipeline, max_body_bytes: int, ping_seconds: float
    ) -> None:
        self._lanes = lanes
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes
        self._ping_seconds = ping_seconds

    async def create(self, request: Request) -> Response:
        identity = checked_identity(request)
        body = decode_body(await read_body(request, self._max_body_bytes), _decoder)
        body.check()
        prompt = _prompt(body)
        model = self._lanes.model(body.model)
        job = job_from(
            body, identity, model, endpoint=PATH, prompts=(prompt,), prompt_param="messages"
        )
        form = ChatForm(job.request_id, model, body)
        return answer(self._pipeline, job, form, self._ping_seconds)


class ChatForm:
    """How one chat completion looks on the wire, in chunks or whole."""

    def __init__(self, request_id: str, model: LineModel, body: ChatCompletionRequest) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._common = {
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        self._has_logprobs = bool(body.logprobs)
        self._has_usage = body.include_usage
        self._num_top_prompt_logprobs = body.prompt_logprobs
        self._begun: set[int] = set()
        # What is the same in every chunk is encoded once: a chunk is a concatenation.
        head = msgspec.json.encode(self._object("chat.completion.chunk"))
        self._head = b"data: " + head.removesuffix(b"}") + b',"choices":[{"index":'
        self._tail = ChunkTail(body)

    def output_events(self, index: int, output: detok_pb2.Output, usage: Usage) -> bytes:
        tail = self._tail(usage)
        head = self._head + str(index).encode() + b',"delta":{'
        text, logprobs, reason = output.text, output.logprobs, finish_reason(output)
        events: list[bytes] = []
        is_first = index not in self._begun
        if is_first or text or logprobs:
            self._begun.add(index)
            events += (
                head,
                b'"role":"assistant","content":' if is_first else b'"content":',
                json_text(text),
                b'},"logprobs":',
                msgspec.json.encode(_logprobs(logprobs)) if logprobs else b"null",
                b',"finish_reason":null',
                tail,
            )
        if reason is not None:
            events += (
                head,
                b'},"logprobs":null,"finish_reason":"',
                reason.encode(),
                b'"',
                tail,
            )
        return b"".join(events)

    def usage_event(self, usage: Usage) -> bytes:
        if not self._has_usage:
            return b""
        chunk = self._object("chat.completion.chunk")
        return event({**chunk, "choices": [], "usage": usage_json(usage)})

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
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
                        "message": {"role": "assistant", "content": choice.text, "refusal": None},
                        "logprobs": _logprobs(choice.logprobs) if self._has_logprobs else None,
                        "finish_reason": choice.finish_reason,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": usage_json(usage),
            }
        )

    def _object(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._common}


def _prompt(body: ChatCompletionRequest) -> tokenizer_pb2.EncodeRequest:
    tools = checked_tools(body.tools)
    kwargs = body.chat_template_kwargs
    return tokenizer_pb2.EncodeRequest(
        chat=tokenizer_pb2.ChatPrompt(
            messages_json=checked_messages(body.messages),
            tools_json=b"" if body.tool_choice == "none" else tools,
            template_kwargs_json=msgspec.json.encode(kwargs) if kwargs else b"",
            add_generation_prompt=body.adds_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
        )
    )


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
