"""One choice of a request, whole: a replica that is lost on the way costs it a pause and no more.

What a sequence has made is in its record as token ids, so that it goes on, on another replica or
the same again, exactly where it stood. Only its last end is told to anybody.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.metrics import Metrics
from gateway.prompt_router import PromptRouter, Route
from gateway.recovery import Recovery
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import TokenlineError, Unavailable, from_proto, to_proto

logger = logging.getLogger(__name__)

_MAX_TIMEOUT_MS: Final = 2**32 - 1


class Sequence:
    """`submit`, begun and where needed begun again. For one event loop.

    `sink` is given the outputs as one unbroken run would give them, the last one with the only
    `finish`. submit.record may hold output_token_ids already, and is kept up to date here.

    deadline: a time of the event loop. What is left of it goes with each submit, and the finish
    is FINISH_REASON_TIMEOUT if it passes while no replica is at work.
    """

    def __init__(
        self,
        submit: detok_pb2.Submit,
        router: PromptRouter,
        sink: Callable[[detok_pb2.Output], None],
        metrics: Metrics,
        *,
        deadline: float | None = None,
    ) -> None:
        self._submit = submit
        self._router = router
        self._sink = sink
        self._metrics = metrics
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._route: Route | None = None
        self._sequence_id = 0
        # Outputs of another attempt than the last are late, and dropped.
        self._num_attempts = 0
        self._is_at_work = False
        self._prefill_started = bool(submit.record.output_token_ids)
        self._aborted = False
        self._finished = False
        self._recovery = Recovery(router.recovery_seconds)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_losses(self) -> int:
        """How often replicas at work on it were lost."""
        return self._recovery.num_losses

    @property
    def engine_address(self) -> str:
        """The engine of the latest attempt; empty before the first."""
        return self._route.engine.address if self._route is not None else ""

    @property
    def detok_address(self) -> str:
        return self._route.detok.address if self._route is not None else ""

    def start(self) -> None:
        """Submits. While the line recovers from the loss of a replica, waits for it instead.

        Raises Unavailable when the line has been away for longer, or was never there.
        """
        try:
            route = self._router.route()
        except Unavailable:
            if not self._router.may_wait():
                raise
            self._recovery.note_waiting(self._loop.time())
            self._wait(until_change=True)
        else:
            self._attempt(route)

    def abort(self) -> None:
        """Asks for the end. The finish, CANCELLED, still comes: at once where nothing is at work
        on the sequence.
        """
        if self._aborted or self._finished:
            return
        self._aborted = True
        if self._is_at_work:
            assert self._route is not None
            self._route.detok.client.abort(self._sequence_id)
        else:
            self._finish(common_pb2.Finish(reason=common_pb2.FINISH_REASON_CANCELLED))

    def _attempt(self, route: Route) -> None:
        submit = detok_pb2.Submit()
        submit.CopyFrom(self._submit)
        submit.engine_address = route.engine.address
        if self._deadline is not None:
            milliseconds = math.ceil((self._deadline - self._loop.time()) * 1000)
            submit.record.timeout_ms = min(max(1, milliseconds), _MAX_TIMEOUT_MS)
        self._num_attempts += 1
        self._route = route
        try:
            self._sequence_id = route.detok.client.submit(
                submit, partial(self._take, self._num_attempts)
            )
        except Unavailable:
            # Its address is gone, and the lane is closing.
            self._lose(Unavailable("The detokenizer is gone.", code="detok_unreachable"))
            return
        self._is_at_work = True
        route.engine.num_own_sequences += 1

    def _take(self, attempt: int, output: detok_pb2.Output) -> None:
        """The sink of one attempt."""
        if attempt != self._num_attempts or not self._is_at_work:
            return
        lost = None
        if output.HasField("finish"):
            self._rest()
            if self._is_loss(output.finish):
                lost = from_proto(output.finish.error)
                output.ClearField("finish")
        self._keep(output)
        if lost is not None:
            ending = self._ending_after_loss()
            if ending is None:
                if _holds_something(output):
                    self._sink(output)
                self._lose(lost)
                return
            output.finish.reason = ending
        if output.HasField("finish"):
            self._end(output)
        elif _holds_something(output):
            self._sink(output)

    def _keep(self, output: detok_pb2.Output) -> None:
        """Brings the record up to what `output` lists, and `output` to what is new in it."""
        record = self._submit.record
        if output.prefill_started:
            if self._prefill_started:
                # Said before. What a later attempt found cached is what the request itself left.
                output.ClearField("prefill_started")
                output.ClearField("num_cached_tokens")
            self._prefill_started = True
        if output.prompt_logprobs:
            record.sampling.prompt_logprobs = False
            record.sampling.top_prompt_logprobs = 0
        if output.token_ids:
            record.output_token_ids.extend(output.token_ids)
            if not self._recovery.is_well:
                self._metrics.note_recovery(self._recovery.note_progress(self._loop.time()))

    def _is_loss(self, finish: common_pb2.Finish) -> bool:
        """Whether another attempt may do better."""
        if finish.reason != common_pb2.FINISH_REASON_ERROR:
            return False
        if finish.error.code == "resume_diverged":
            logger.critical(
                "request %s did not repeat its own tokens on engine %s through detok %s: %s",
                self._submit.request_id,
                self.engine_address,
                self.detok_address,
                finish.error.message,
            )
        # A full queue refuses what comes new. What was taken once is owed an answer.
        return finish.error.kind == common_pb2.ERROR_KIND_UNAVAILABLE or (
            finish.error.kind == common_pb2.ERROR_KIND_OVERLOADED and self._num_attempts > 1
        )

    def _ending_after_loss(self) -> common_pb2.FinishReason.ValueType | None:
        """How a sequence ends that nobody is at work on any more; None where it goes on."""
        if self._aborted:
            return common_pb2.FINISH_REASON_CANCELLED
        if self._deadline is not None and self._loop.time() >= self._deadline:
            return common_pb2.FINISH_REASON_TIMEOUT
        return None

    def _lose(self, error: TokenlineError) -> None:
        """An attempt has failed, and another may do better."""
        assert self._route is not None
        logger.info(
            "a sequence of request %s was lost on engine %s through detok %s: %s",
            self._submit.request_id,
            self.engine_address,
            self.detok_address,
            error.code,
        )
        now = self._loop.time()
        self._recovery.note_loss(now, error, self._route)
        if self._recovery.may_try_at_once or self._recovery.verdict(now) is not None:
            self._try()
        else:
            # Not at the next change: a replica that fails at once is ready again at once.
            self._wait(until_change=False)

    def _wait(self, *, until_change: bool) -> None:
        """Tries again after the back-off, or with `until_change` as soon as a replica is ready."""
        try_at = self._recovery.next_try_at(self._loop.time())
        if self._deadline is not None:
            try_at = min(try_at, self._deadline)
        self._timer = self._loop.call_at(try_at, self._try)
        if until_change:
            self._router.changes.call_once(self._try)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._router.changes.forget(self._try)

    def _try(self) -> None:
        """Submits again if there is where to; waits, ends or gives up otherwise."""
        if self._finished or self._is_at_work:
            return
        self._stop_waiting()
        if (ending := self._ending_after_loss()) is not None:
            self._finish(common_pb2.Finish(reason=ending))
        elif (error := self._recovery.verdict(self._loop.time())) is not None:
            reason = common_pb2.FINISH_REASON_ERROR
            self._finish(common_pb2.Finish(reason=reason, error=to_proto(error)))
        elif (route := self._usable_route()) is None:
            self._wait(until_change=True)
        else:
            if self._recovery.reason:
                self._metrics.note_resubmission(self._recovery.reason)
            self._attempt(route)

    def _usable_route(self) -> Route | None:
        try:
            route = self._router.route(self._recovery.lost_lanes)
        except Unavailable:
            return None
        # A suspect route means that there is no other. The poll that its loss has caused may say
        # more in a moment.
        return route if self._recovery.has_waited or not route.suspect else None

    def _rest(self) -> None:
        """The attempt is over."""
        assert self._route is not None
        self._is_at_work = False
        self._route.engine.num_own_sequences -= 1

    def _finish(self, finish: common_pb2.Finish) -> None:
        self._end(detok_pb2.Output(finish=finish))

    def _end(self, output: detok_pb2.Output) -> None:
        self._finished = True
        self._stop_waiting()
        self._sink(output)


def _holds_something(output: detok_pb2.Output) -> bool:
    return bool(
        output.token_ids
        or output.text
        or output.prefill_started
        or output.logprobs
        or output.prompt_logprobs
    )
