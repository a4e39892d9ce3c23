"""The sequences of one request on their way: outputs gathered as they come, aborted on leaving."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Self

from gateway.lane import DetokLane, EngineLane
from gateway.live_request import LiveRequest
from gateway.metrics import Metrics
from gateway.records import FINISH_REASONS, Stage, gravest
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import RequestTimeout
from protos.wire.stream_adapter import detok_adapter

_merge: Final = detok_adapter().merge


@dataclass(slots=True)
class _Sequence:
    """One choice. `is_first_choice` of its prompt: its cached tokens are the prompt's."""

    engine: EngineLane
    detok: DetokLane
    is_first_choice: bool
    sequence_id: int = 0
    last_token_at: float = 0.0
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Generation:
    """An async context manager: leaving it aborts the sequences that have not finished.

    A sequence is known by its place in the order of `start`, the choice index of the API.

    prompt_only: what is sampled is dropped, as if max_tokens were 0. in_reasoning: the prompt ends
    where the model's thoughts begin.
    """

    def __init__(
        self,
        request: LiveRequest,
        metrics: Metrics,
        *,
        prompt_only: bool = False,
        in_reasoning: bool = False,
    ) -> None:
        self.in_reasoning = in_reasoning
        self._request = request
        self._metrics = metrics
        self._prompt_only = prompt_only
        self._sequences: list[_Sequence] = []
        self._num_unfinished = 0
        self._pending: dict[int, detok_pb2.Output] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._timed_out = False
        # What the reader is to be told instead of outputs.
        self._error: RequestTimeout | None = None

    async def __aenter__(self) -> Self:
        self._request.enter(Stage.WAITING)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()
        if kind is None and not self._num_unfinished:
            self._request.finish(gravest([sequence.finish_reason for sequence in self._sequences]))

    def start(
        self,
        submit: detok_pb2.Submit,
        engine: EngineLane,
        detok: DetokLane,
        *,
        is_first_choice: bool,
    ) -> None:
        """Begins the next sequence."""
        sequence = _Sequence(engine, detok, is_first_choice)
        sink = partial(self._take, len(self._sequences))
        sequence.sequence_id = detok.client.submit(submit, sink)
        engine.num_own_sequences += 1
        self._num_unfinished += 1
        self._sequences.append(sequence)

    @property
    def engines(self) -> list[str]:
        return sorted({sequence.engine.address for sequence in self._sequences})

    @property
    def detoks(self) -> list[str]:
        return sorted({sequence.detok.address for sequence in self._sequences})

    @property
    def num_choices(self) -> int:
        return len(self._sequences)

    @property
    def finished(self) -> bool:
        """Whether every sequence has finished and its last output was taken."""
        return not self._num_unfinished and not self._pending

    @property
    def usage(self) -> Usage:
        record = self._request.record
        return Usage(record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens)

    def note_tool_calls(self, index: int) -> None:
        """What choice `index` says calls tools, which no other stage can know."""
        if self._sequences[index].finish_reason == "stop":
            self._sequences[index].finish_reason = "tool_calls"

    def abort(self) -> None:
        """Asks for the end of all sequences; their finishes still come."""
        for sequence in self._sequences:
            if not sequence.finish_reason:
                sequence.detok.client.abort(sequence.sequence_id)

    def time_out(self) -> None:
        """Ends all sequences with the reason `timeout`; with an error, if no token has come."""
        if not self._request.record.num_output_tokens:
            self._error = timed_out()
            self._wake()
            return
        self._timed_out = True
        self.abort()

    async def next_outputs(self, timeout_seconds: float) -> Mapping[int, detok_pb2.Output]:
        """What came since the last call, one merged output per choice index.

        Waits for the first; empty when none came within `timeout_seconds`. Raises RequestTimeout.
        """
        if not self._pending and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_seconds, _wake, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._error is not None:
            raise self._error
        outputs, self._pending = self._pending, {}
        return outputs

    def _take(self, index: int, output: detok_pb2.Output) -> None:
        """The sink of sequence `index`."""
        if self._closed:
            return
        sequence = self._sequences[index]
        if self._prompt_only:
            _drop_what_is_sampled(output)
        if self._timed_out and output.finish.reason == common_pb2.FINISH_REASON_CANCELLED:
            output.finish.reason = common_pb2.FINISH_REASON_TIMEOUT
        if output.prefill_started:
            self._request.enter(Stage.PREFILLING)
            if sequence.is_first_choice:
                self._request.count_cached_tokens(output.num_cached_tokens)
        num_tokens = len(output.token_ids)
        if num_tokens:
            now = time.monotonic()
            if sequence.last_token_at:
                seconds = (now - sequence.last_token_at) / num_tokens
                self._metrics.inter_token_latency.observe(seconds, num_tokens)
            sequence.last_token_at = now
            self._request.count_tokens(num_tokens)
        if output.HasField("finish"):
            sequence.finish_reason = FINISH_REASONS.get(output.finish.reason, "error")
            sequence.engine.num_own_sequences -= 1
            self._num_unfinished -= 1
        elif not (num_tokens or output.text or output.prompt_logprobs):
            # Nothing for the reader: a stream is not to begin before the first token.
            return
        pending = self._pending.get(index)
        if pending is None:
            self._pending[index] = output
        else:
            _merge(pending, output)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            _wake(self._waiter)

    def _close(self) -> None:
        self._closed = True
        self.abort()
        for sequence in self._sequences:
            if not sequence.finish_reason:
                sequence.engine.num_own_sequences -= 1


def timed_out() -> RequestTimeout:
    """What a request ends with whose `timeout` was over before its first token."""
    return RequestTimeout(
        "The request's `timeout` was over before its first token.", code="timeout", param="timeout"
    )


def _drop_what_is_sampled(output: detok_pb2.Output) -> None:
    for name in ("text", "token_ids", "logprobs"):
        output.ClearField(name)
    if output.finish.reason == common_pb2.FINISH_REASON_STOP:
        output.finish.reason = common_pb2.FINISH_REASON_LENGTH
        output.finish.ClearField("stop_match")


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
