"""POST /v1/completions: from the body to a job, from outputs to chunks and the answer."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import Choice, answer, finish_reason, usage_json
from gateway.generation import Usage
from gateway.identity import checked_identity
from gateway.job import Prompt, job_from
from gateway.lanes import Lanes, LineModel
from gateway.openai_schema import CompletionRequest
from gateway.pipeline import Pipeline
from gateway.request_body import decode_body, read_body
from gateway.sse import event, json_text
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2

PATH: Final = "/v1/completions"

_decoder: Final = msgspec.json.Decoder(CompletionRequest)


class Completions:
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
        prompts = [_prompt(prompt) for prompt in body.prompts()]
        model = self._lanes.model(body.model)
        job = job_from(body, identity, model, endpoint=PATH, prompts=prompts, prompt_param="prompt")
        form = CompletionForm(job.request_id, model, body)
        return answer(self._pipeline, job, form, self._ping_seconds)


class CompletionForm:
    """How one text completion looks on the wire, in chunks or whole."""

    def __init__(self, request_id: str, model: LineModel, body: CompletionRequest) -> None:
        self._common = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        self._has_logprobs = body.logprobs is not None
        self._has_usage = body.include_usage
        # Where in its choice's text the next token begins.
        self._offsets: defaultdict[int, _TextOffset] = defaultdict(_TextOffset)
        head = msgspec.json.encode(self._common)
        self._head = b"data: " + head.removesuffix(b"}") + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if self._has_usage else b"}]}\n\n"

    def output_events(self, index: int, output: detok_pb2.Output) -> bytes:
        head = self._head + str(index).encode() + b',"text":'
        text, logprobs, reason = output.text, output.logprobs, finish_reason(output)
        events: list[bytes] = []
        if text or logprobs:
            encoded = b"null"
            if logprobs:
                encoded = msgspec.json.encode(_logprobs(logprobs, self._offsets[index]))
            events += (
                head,
                json_text(text),
                b',"logprobs":',
                encoded,
                b',"finish_reason":null',
                self._tail,
            )
        if reason is not None:
            events += (
                head,
                b'"","logprobs":null,"finish_reason":"',
                reason.encode(),
                b'"',
                self._tail,
            )
        return b"".join(events)

    def usage_event(self, usage: Usage) -> bytes:
        if not self._has_usage:
            return b""
        return event({**self._common, "choices": [], "usage": usage_json(usage)})

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return msgspec.json.encode(
            {
                **self._common,
                "choices": [
                    {
                        "index": index,
                        "text": choice.text,
                        "logprobs": (
                            _logprobs(choice.logprobs, _TextOffset())
                            if self._has_logprobs
                            else None
                        ),
                        "finish_reason": choice.finish_reason,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": usage_json(usage),
            }
        )


class _TextOffset:
    """Counts characters through tokens that may hold parts of one, by UTF-8's first bytes."""

    def __init__(self) -> None:
        self._num_begun = 0

    def advance(self, token_bytes: bytes) -> int:
        """The index of the character that the token begins in; moves past the token."""
        continues = bool(token_bytes) and _is_continuation(token_bytes[0])
        offset = self._num_begun - 1 if continues and self._num_begun else self._num_begun
        self._num_begun += sum(not _is_continuation(byte) for byte in token_bytes)
        return offset


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _prompt(prompt: str | tuple[int, ...]) -> Prompt:
    if isinstance(prompt, tuple):
        return prompt
    return tokenizer_pb2.EncodeRequest(
        text=tokenizer_pb2.TextPrompt(text=prompt, add_special_tokens=True)
    )


def _logprobs(
    tokens: Iterable[detok_pb2.TokenLogprobs], offset: _TextOffset
) -> dict[str, list[Any]]:
    """The legacy format: four lists of one entry per token."""
    entries = list(tokens)
    return {
        "tokens": [entry.token.text for entry in entries],
        "token_logprobs": [entry.token.logprob for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": [offset.advance(entry.token.text_bytes) for entry in entries],
    }


def _top(entry: detok_pb2.TokenLogprobs) -> dict[str, float] | None:
    """By text; the sampled token is always among them. None when no likeliest were asked for."""
    if not entry.top:
        return None
    # Of two tokens with one text the likelier stays: later entries do not replace it.
    top: dict[str, float] = {}
    for token in (*entry.top, entry.token):
        top.setdefault(token.text, token.logprob)
    return top
