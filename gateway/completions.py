"""POST /v1/completions: from the body to a job, from outputs to chunks and the answer."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answer_form import (
    AnswerForm,
    Choice,
    ChunkTail,
    finish_reason,
    prompt_logprobs_json,
    usage_json,
)
from gateway.answers import answer
from gateway.call import Call, new_call
from gateway.event_ids import LAST_EVENT_ID
from gateway.job import Job, Prompt, job_from
from gateway.lanes import Lanes, LineModel
from gateway.legacy_logprobs import Lists, TextOffset, joined, output_logprobs, prompt_logprobs
from gateway.openai_schema import CompletionRequest
from gateway.refusals import counts_refusals
from gateway.request_body import decode_body, read_body
from gateway.runs import Runs
from gateway.sse import event, json_text
from gateway.usage import Usage
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2

PATH: Final = "/v1/completions"

_decoder: Final = msgspec.json.Decoder(CompletionRequest)


class Completions:
    """The endpoint."""

    def __init__(self, lanes: Lanes, runs: Runs, max_body_bytes: int, ping_seconds: float) -> None:
        self._lanes = lanes
        self._runs = runs
        self._max_body_bytes = max_body_bytes
        self._ping_seconds = ping_seconds

    @counts_refusals(PATH)
    async def create(self, request: Request) -> Response:
        call = new_call(request, PATH, await read_body(request, self._max_body_bytes))
        job, form = await self.prepare(call)
        opened = await self._runs.open(call, job, form, request.headers.get(LAST_EVENT_ID))
        return answer(opened, self._ping_seconds)

    async def prepare(self, call: Call) -> "tuple[Job, CompletionForm]":
        """Raises InvalidRequest."""
        body = decode_body(call.body, _decoder)
        body.check()
        prompts = [_prompt(prompt) for prompt in body.prompts()]
        model = self._lanes.model(body.model)
        job = job_from(body, call, model, endpoint=PATH, prompts=prompts, prompt_param="prompt")
        echoed = await asyncio.gather(
            *(self._text_of(prompt, body) for prompt in body.prompts() if body.echo)
        )
        return job, CompletionForm(call, model, body, echoed)

    async def _text_of(self, prompt: str | tuple[int, ...], body: CompletionRequest) -> str:
        """The prompt as it is echoed: text as it came."""
        if isinstance(prompt, str):
            return prompt
        return await self._lanes.decode(
            tokenizer_pb2.DecodeRequest(
                token_ids=prompt, skip_special_tokens=body.skips_special_tokens
            )
        )


class CompletionForm(AnswerForm[Choice]):
    """How one text completion looks on the wire, in chunks or whole.

    echoed: the text of each prompt, which its choices begin with; empty for none.
    """

    has_event_ids = True

    def __init__(
        self,
        call: Call,
        model: LineModel,
        body: CompletionRequest,
        echoed: Sequence[str] = (),
    ) -> None:
        self._common = {
            "id": f"cmpl-{call.request_id}",
            "object": "text_completion",
            "created": call.created,
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        self._body = body
        self._echoed = echoed
        # Per choice whose echo was sent, or needs none: where in its text the next token begins.
        self._offsets: dict[int, TextOffset] = {}
        head = msgspec.json.encode(self._common)
        self._head = b"data: " + head.removesuffix(b"}") + b',"choices":[{"index":'
        self._tail = ChunkTail(body)

    def new_choice(self) -> Choice:
        return Choice()

    def output_events(self, index: int, output: detok_pb2.Output, usage: Usage) -> bytes:
        text, reason, lists = output.text, finish_reason(output), None
        if index not in self._offsets:
            echo = self._echo(index)
            self._offsets[index] = TextOffset(len(echo))
            text = echo + text
            lists = self._prompt_lists(index, output.prompt_logprobs)
        if output.logprobs:
            shown = output_logprobs(output.logprobs, self._offsets[index])
            lists = shown if lists is None else joined(lists, shown)
        if not text and lists is None and reason is None:
            return b""
        return self._chunk(index, text, lists, reason, usage)

    async def last_events(self, usage: Usage) -> bytes:
        if not self._body.include_usage:
            return b""
        return event({**self._common, "choices": [], "usage": usage_json(usage)})

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shown = enumerate(self._returned(choices))
        return msgspec.json.encode(
            {
                **self._common,
                "choices": [
                    {"index": index, **self._choice(drawn, choices[drawn])}
                    for index, drawn in shown
                ],
                "usage": usage_json(usage),
            }
        )

    def _chunk(
        self, index: int, text: str, logprobs: Lists | None, reason: str | None, usage: Usage
    ) -> bytes:
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            json_text(text),
            b"null" if logprobs is None else msgspec.json.encode(logprobs),
            b"null" if reason is None else json_text(reason),
            self._tail(usage),
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = self._echo(index)
        lists = None
        if self._body.logprobs is not None:
            lists = output_logprobs(choice.logprobs, TextOffset(len(echo)))
            prompt_lists = self._prompt_lists(index, choice.prompt_logprobs)
            lists = joined(prompt_lists, lists) if prompt_lists else lists
        made: dict[str, Any] = {
            "text": echo + choice.text,
            "logprobs": lists,
            "finish_reason": choice.finish_reason,
        }
        if (num_top := self._body.prompt_logprobs) is not None:
            made["prompt_logprobs"] = prompt_logprobs_json(choice.prompt_logprobs, num_top)
        return made

    def _echo(self, index: int) -> str:
        """The text of the prompt of choice `index`, where it is to be echoed."""
        return self._echoed[index // self._body.num_choices] if self._echoed else ""

    def _prompt_lists(self, index: int, tokens: Sequence[detok_pb2.TokenLogprobs]) -> Lists | None:
        num_top = self._body.logprobs
        if not self._echoed or num_top is None or not tokens:
            return None
        return prompt_logprobs(tokens, num_top, self._echo(index))

    def _returned(self, choices: Sequence[Choice]) -> list[int]:
        """Indices of the choices to show: of each prompt the best by mean log-probability."""
        num_drawn, num_returned = self._body.num_choices, self._body.num_returned
        if num_drawn == num_returned:
            return list(range(len(choices)))
        returned: list[int] = []
        for first in range(0, len(choices), num_drawn):
            drawn = range(first, first + num_drawn)
            best = sorted(drawn, key=lambda index: choices[index].mean_logprob, reverse=True)
            returned += best[:num_returned]
        return returned


def _prompt(prompt: str | tuple[int, ...]) -> Prompt:
    if isinstance(prompt, tuple):
        return prompt
    return tokenizer_pb2.EncodeRequest(
        text=tokenizer_pb2.TextPrompt(text=prompt, add_special_tokens=True)
    )
