"""Carries out a job and sends its answer, streamed or whole; the endpoints say how it looks."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientDisconnected, log_fault
from gateway.generation import Usage
from gateway.generation_fields import GenerationFields
from gateway.interruption import ended_by_disconnect
from gateway.job import Job
from gateway.pipeline import Pipeline
from gateway.records import FINISH_REASONS
from gateway.sse import DONE, PING, EventStream, error_event
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import InternalError, InvalidRequest, TokenlineError, from_proto

logger = logging.getLogger(__name__)

# A whole answer has no pings to send; it only looks up this often.
_PATIENCE_SECONDS: Final = 60.0


@dataclass(slots=True)
class Choice:
    """One choice of a whole answer, as it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[detok_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[detok_pb2.TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def mean_logprob(self) -> float:
        """Over the tokens that are shown; the least there is where none is."""
        logprobs = [entry.token.logprob for entry in self.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else -math.inf

    def add(self, output: detok_pb2.Output) -> None:
        self.texts.append(output.text)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.finish_reason = finish_reason(output)


class GrowingChoice(Protocol):
    """One choice of a whole answer, as it grows."""

    def add(self, output: detok_pb2.Output) -> None: ...


ChoiceT = TypeVar("ChoiceT", bound=GrowingChoice)


class AnswerForm(ABC, Generic[ChoiceT]):
    """How an endpoint writes one answer, streamed or whole.

    `end_of_stream` ends every stream; `ping` is sent while there is nothing to say.
    """

    end_of_stream: ClassVar[bytes] = DONE
    ping: ClassVar[bytes] = PING

    def begin(self, *, in_reasoning: bool) -> None:
        """Called once, before all else. in_reasoning: the prompt ends where thoughts begin."""

    def has_calls(self, index: int) -> bool:
        """Whether choice `index`, streamed so far, calls tools."""
        return False

    @abstractmethod
    def new_choice(self) -> ChoiceT:
        """The next choice of a whole answer."""

    @abstractmethod
    def output_events(self, index: int, output: detok_pb2.Output, usage: Usage) -> bytes:
        """Events for what choice `index` gained; empty when there is nothing to say.

        `usage` is the whole request's up to now.
        """

    @abstractmethod
    async def last_events(self, usage: Usage) -> bytes:
        """The events after all outputs; `end_of_stream` follows them."""

    def failure_events(self, error: TokenlineError) -> bytes:
        """The events of a stream that fails."""
        return error_event(error)

    @abstractmethod
    async def whole(self, choices: Sequence[ChoiceT], usage: Usage) -> bytes:
        """The whole answer as JSON."""


def answer(
    pipeline: Pipeline, job: Job, form: AnswerForm[ChoiceT], ping_seconds: float
) -> Response:
    """The response that carries out `job`."""
    if job.streams:
        return StreamedAnswer(pipeline, job, form, ping_seconds)
    return WholeAnswer(pipeline, job, form)


class StreamedAnswer(Response):
    """Runs the job and streams it. Errors before the first output are HTTP errors."""

    def __init__(
        self, pipeline: Pipeline, job: Job, form: AnswerForm[Any], ping_seconds: float
    ) -> None:
        self._pipeline = pipeline
        self._job = job
        self._form = form
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        with suppress(ClientDisconnected):
            async with ended_by_disconnect(receive):
                await self.answer(stream)

    async def answer(self, stream: EventStream) -> None:
        """Writes the whole answer to `stream`."""
        try:
            last = await self._stream_outputs(stream)
        except Exception as error:
            if not stream.started:
                raise
            last = self._form.failure_events(as_typed(error))
        await stream.close(last + self._form.end_of_stream)

    async def _stream_outputs(self, stream: EventStream) -> bytes:
        """Sends every output, and returns the events that end the stream."""
        async with self._pipeline.run(self._job) as generation:
            self._form.begin(in_reasoning=generation.in_reasoning)
            events = b""
            while not generation.finished:
                outputs = await generation.next_outputs(self._ping_seconds)
                usage = generation.usage
                events = b"".join(
                    [
                        self._form.output_events(index, output, usage)
                        for index, output in outputs.items()
                    ]
                )
                for index in filter(self._form.has_calls, outputs):
                    generation.note_tool_calls(index)
                failed = next(filter(_has_failed, outputs.values()), None)
                if failed is not None:
                    if stream.started and events:
                        await stream.send(events)
                    raise _failure(self._job, failed)
                if not generation.finished and (events or not outputs):
                    await stream.send(events or self._form.ping)
            return events + await self._form.last_events(generation.usage)


class WholeAnswer(Response):
    """Runs the job and answers with one JSON body when all is there."""

    def __init__(self, pipeline: Pipeline, job: Job, form: AnswerForm[Any]) -> None:
        self._pipeline = pipeline
        self._job = job
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnected):
            async with ended_by_disconnect(receive):
                body = await self._collect()
                await Response(body, media_type="application/json")(scope, receive, send)

    async def _collect(self) -> bytes:
        async with self._pipeline.run(self._job) as generation:
            self._form.begin(in_reasoning=generation.in_reasoning)
            choices = [self._form.new_choice() for _ in range(generation.num_choices)]
            while not generation.finished:
                outputs = await generation.next_outputs(_PATIENCE_SECONDS)
                for index, output in outputs.items():
                    if _has_failed(output):
                        raise _failure(self._job, output)
                    choices[index].add(output)
                    if choices[index].finish_reason == "tool_calls":
                        generation.note_tool_calls(index)
            return await self._form.whole(choices, generation.usage)


def usage_json(usage: Usage) -> dict[str, Any]:
    """The `usage` object of both endpoints."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChunkTail:
    """What ends every chunk after its choice: as bytes, since a chunk is a concatenation."""

    def __init__(self, body: GenerationFields) -> None:
        self._has_usage = body.has_usage_in_chunks
        self._constant = b'}],"usage":null}\n\n' if body.include_usage else b"}]}\n\n"

    def __call__(self, usage: Usage) -> bytes:
        """`usage` is the whole request's up to now."""
        if not self._has_usage:
            return self._constant
        return b'}],"usage":' + msgspec.json.encode(usage_json(usage)) + b"}\n\n"


def prompt_logprobs_json(
    tokens: Sequence[detok_pb2.TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token first; null for the first.

    A token that is not among the likeliest that were computed has the rank null.
    """
    return [None, *(_by_token_id(entry, num_top) for entry in tokens[1:])]


def _by_token_id(entry: detok_pb2.TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranks = {token.token_id: rank for rank, token in enumerate(entry.top, start=1)}
    return {
        str(token.token_id): {
            "logprob": token.logprob,
            "rank": ranks.get(token.token_id),
            "decoded_token": token.text,
        }
        for token in (entry.token, *entry.top[:num_top])
    }


def finish_reason(output: detok_pb2.Output) -> str | None:
    """The API's word for how the sequence ended; None while it has not.

    None also where it failed: an error is told by an event of its own.
    """
    if not output.HasField("finish") or _has_failed(output):
        return None
    return FINISH_REASONS[output.finish.reason]


def _has_failed(output: detok_pb2.Output) -> bool:
    return output.HasField("finish") and output.finish.reason == common_pb2.FINISH_REASON_ERROR


def _failure(job: Job, output: detok_pb2.Output) -> TokenlineError:
    """The error of a sequence that has failed, with the names that the client knows."""
    error = from_proto(output.finish.error)
    if isinstance(error, InvalidRequest) and error.param in ("", "grammar"):
        return InvalidRequest(error.message, code=error.code, param=job.grammar_param)
    return error


def as_typed(error: Exception) -> TokenlineError:
    """`error` as it may be told to a client; what is a fault of ours is logged."""
    if isinstance(error, TokenlineError):
        log_fault(error)
        return error
    logger.exception("a stream failed")
    return InternalError("The server failed on this request.")
