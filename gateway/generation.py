"""The sequences of one request on their way: outputs logged as they come, aborted on leaving."""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from gateway.chat_reducer import ChatReducer, TextReading
from gateway.live_request import LiveRequest
from gateway.metrics import Metrics
from gateway.output_log import OutputLog
from gateway.prompt_router import PromptRouter
from gateway.records import FINISH_REASONS, Stage, gravest
from gateway.sequence import Sequence
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import RequestTimeout, TokenlineError, from_proto


@dataclass(slots=True)
class _Choice:
    """One choice. `is_first_choice` of its prompt: its cached tokens are the prompt's."""

    sequence: Sequence
    is_first_choice: bool
    last_token_at: float = 0.0
    finish_reason: str = ""
    reducer: ChatReducer | None = None


class Generation:
    """An async context manager: leaving it aborts the sequences that have not finished.

    A sequence is known by its place in the order of `start`, the choice index of the API. What it
    gains goes to `log`.

    prompt_only: what is sampled is dropped, as if max_tokens were 0. reading: how the text of a
    choice is read, which tells whether it calls tools.
    """

    def __init__(
        self,
        request: LiveRequest,
        metrics: Metrics,
        log: OutputLog,
        *,
        prompt_only: bool = False,
        reading: TextReading,
        in_reasoning: bool = False,
    ) -> None:
        self._request = request
        self._metrics = metrics
        self._log = log
        self._prompt_only = prompt_only
        self._new_reducer = (
            partial(ChatReducer, reading, "", in_reasoning=in_reasoning)
            if reading.call_format is not None
            else None
        )
        self._choices: list[_Choice] = []
        self._num_unfinished = 0
        self._ended = asyncio.Event()
        self._error: TokenlineError | None = None
        self._closed = False
        self._timed_out = False

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
            self._request.finish(gravest([choice.finish_reason for choice in self._choices]))

    def start(
        self,
        submit: detok_pb2.Submit,
        router: PromptRouter,
        *,
        is_first_choice: bool,
        deadline: float | None = None,
    ) -> None:
        """Begins the next sequence. `deadline`: see Sequence."""
        sink = partial(self._take, len(self._choices))
        sequence = Sequence(submit, router, sink, self._metrics, deadline=deadline)
        sequence.start()
        self._num_unfinished += 1
        reducer = self._new_reducer() if self._new_reducer is not None else None
        self._choices.append(_Choice(sequence, is_first_choice, reducer=reducer))

    @property
    def engines(self) -> list[str]:
        return sorted({choice.sequence.engine_address for choice in self._choices} - {""})

    @property
    def detoks(self) -> list[str]:
        return sorted({choice.sequence.detok_address for choice in self._choices} - {""})

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    async def until_ended(self) -> None:
        """Returns when every sequence has finished. Raises the error of one that failed."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Asks for the end of all sequences; their finishes still come."""
        for choice in self._choices:
            choice.sequence.abort()

    def time_out(self) -> None:
        """Ends all sequences with the reason `timeout`; with an error, if no token has come."""
        if not self._request.record.num_output_tokens:
            self._fail(timed_out())
            return
        self._timed_out = True
        self.abort()

    def _take(self, index: int, output: detok_pb2.Output) -> None:
        """The sink of sequence `index`."""
        if self._closed:
            return
        choice = self._choices[index]
        if self._prompt_only:
            _drop_what_is_sampled(output)
        if self._timed_out and output.finish.reason == common_pb2.FINISH_REASON_CANCELLED:
            output.finish.reason = common_pb2.FINISH_REASON_TIMEOUT
        if output.prefill_started:
            self._request.enter(Stage.PREFILLING)
            if not choice.is_first_choice:
                output.num_cached_tokens = 0
            self._request.count_cached_tokens(output.num_cached_tokens)
        num_tokens = len(output.token_ids)
        if num_tokens:
            now = time.monotonic()
            if choice.last_token_at:
                seconds = (now - choice.last_token_at) / num_tokens
                self._metrics.inter_token_latency.observe(seconds, num_tokens)
            choice.last_token_at = now
            self._request.count_tokens(num_tokens)
        if choice.reducer is not None:
            choice.reducer.feed(output.text)
        if output.HasField("finish"):
            self._finish(choice, output)
        if num_tokens or output.text or _holds_more(output):
            self._log.append(index, output)
        if not self._num_unfinished:
            self._ended.set()

    def _finish(self, choice: _Choice, output: detok_pb2.Output) -> None:
        """The last output of a sequence. A failure is told as such, not as the end of a choice."""
        choice.finish_reason = FINISH_REASONS.get(output.finish.reason, "error")
        self._num_unfinished -= 1
        if choice.finish_reason == "error":
            self._fail(from_proto(output.finish.error))
            output.ClearField("finish")
        elif choice.reducer is not None and choice.finish_reason == "stop":
            choice.reducer.end()
            if choice.reducer.has_calls:
                choice.finish_reason = "tool_calls"

    def _fail(self, error: TokenlineError) -> None:
        if self._error is None:
            self._error = error
            self._ended.set()

    def _close(self) -> None:
        self._closed = True
        self.abort()


def timed_out() -> RequestTimeout:
    """What a request ends with whose `timeout` was over before its first token."""
    return RequestTimeout(
        "The request's `timeout` was over before its first token.", code="timeout", param="timeout"
    )


def _drop_what_is_sampled(output: detok_pb2.Output) -> None:
    for name in ("text", "token_ids", "logprobs", "text_lengths", "logprob_counts"):
        output.ClearField(name)
    if output.finish.reason == common_pb2.FINISH_REASON_STOP:
        output.finish.reason = common_pb2.FINISH_REASON_LENGTH
        output.finish.ClearField("stop_match")


def _holds_more(output: detok_pb2.Output) -> bool:
    """Whether an output without a token holds anything for a reader."""
    return bool(output.HasField("finish") or output.prompt_logprobs or output.num_cached_tokens)
