"""Where requests wait for the engines: bounded, in fair order, the rest sent away with a time."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from gateway.drain_rate import DrainRate
from gateway.engine_places import EnginePlaces
from gateway.errors import QueueFull
from gateway.fair_queue import Entry, FairQueue
from gateway.histogram import Histogram
from gateway.job import Job
from gateway.live_request import LiveRequest
from gateway.promises import Promises
from gateway.queue_bounds import QueueBounds
from gateway.records import RequestRecord, Stage
from gateway.visit import Place, Visit, cancelled, no_engine, timed_out, too_late

WAIT_SECONDS: Final = (
    0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
# Engines report with each step; this is for those that have nothing to say.
_LOOK_AGAIN_SECONDS: Final = 0.05
_NATURAL_ENDS: Final = ("stop", "length", "tool_calls")


class WaitingRoom:
    """All counts are of sequences: a request with several choices or prompts is that many.

    num_sampled: tokens that were sampled since the beginning. recovery_seconds: how long requests
    wait while there is no engine at all.
    """

    def __init__(
        self,
        places: EnginePlaces,
        bounds: QueueBounds,
        num_sampled: Callable[[], int],
        recovery_seconds: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._places = places
        self._bounds = bounds
        self._num_sampled = num_sampled
        self._recovery_seconds = recovery_seconds
        self._saw_engines_at = self._clock()
        self.waits = Histogram(
            "tokenline_admission_wait_seconds",
            "Time from a prompt's encoding until its sequences may start.",
            WAIT_SECONDS,
        )
        self.queue: FairQueue[Place] = FairQueue()
        self.promises = Promises(self._clock)
        self.drain = DrainRate(self._clock())
        self.num_refused: Counter[str] = Counter()
        # By tenant: in the tokenizer, so not in the queue yet.
        self._coming: Counter[str] = Counter()
        self._num_coming = 0
        # Allowed to start, but not yet seen at an engine.
        self._num_granted = 0
        # Requests whose turn has come, in this order.
        self._started_at: dict[Visit, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_looking_soon = False

    def visit(self, job: Job, *, goes_on: bool = False) -> Visit:
        """A request at the door. If it was told to come now, this takes up the promise."""
        seconds_left = job.seconds_left
        visit = Visit(job, self._clock() + (math.inf if seconds_left is None else seconds_left))
        visit.goes_on = goes_on
        # Hashing a prompt takes time, which is only worth it where somebody was refused.
        visit.is_promised = self.promises.num_open > 0 and self.promises.take(*visit.keys)
        return visit

    def come_in(self, visit: Visit) -> None:
        """The first look at a request, before its prompt is read. Raises QueueFull."""
        self._measure()
        num_before = max(0, self._num_coming + self.queue.num_sequences - self._num_free())
        num_after = num_before + visit.num_sequences
        bounds, has_promised = self._bounds, self.promises.num_open > 0
        if not (
            num_after <= (bounds.newcomer_sequences if has_promised else bounds.max_sequences)
            or not num_before
            or visit.goes_on
            or (visit.is_promised and num_before < bounds.promised_sequences)
            or self._is_below_its_share(visit)
        ):
            raise self.refusal(visit, "queued_requests")
        self._coming[visit.tenant] += visit.num_sequences
        self._num_coming += visit.num_sequences

    def leave(self, visit: Visit, record: RequestRecord) -> None:
        """The request has ended, wherever it was."""
        self._arrive(visit)
        self._started_at.pop(visit, None)
        if visit.num_tokens:
            used = record.num_prompt_tokens + record.num_output_tokens
            self.queue.settle(visit.tenant, used - visit.num_tokens)
            # One that was given up says nothing of how long answers are.
            if record.num_output_tokens and record.finish_reason in _NATURAL_ENDS:
                self.drain.note_end(visit.num_sequences, record.num_output_tokens)
        self.look()

    @asynccontextmanager
    async def turn(
        self, visit: Visit, request: LiveRequest, num_prompt_tokens: int, max_tokens: int
    ) -> AsyncIterator[None]:
        """Waits for the request's turn. The block is to start all its sequences.

        num_prompt_tokens, max_tokens: of all its sequences together. Raises QueueFull,
        RequestTimeout, RequestCancelled or Unavailable.
        """
        request.enter(Stage.WAITING)
        self._arrive(visit)
        if visit.goes_on:
            yield
            return
        self._measure()
        place = Place(visit, asyncio.get_running_loop().create_future())
        num_tokens = num_prompt_tokens + self._expected_output(visit, max_tokens)
        entry = Entry(
            place,
            visit.tenant,
            visit.num_sequences,
            num_tokens,
            visit.job.priority,
            visit.is_promised,
        )
        self._make_room(visit, entry)
        request.on_cancel(lambda: place.fail(cancelled()))
        request.on_timeout(lambda: place.fail(timed_out()))
        began = self._clock()
        if not self.queue.num_requests:
            self._saw_engines_at = began
        self.queue.add(entry)
        self.look()
        try:
            await place.granted
            visit.num_tokens = num_tokens
            self._started_at[visit] = self._clock()
            self.waits.observe(self._clock() - began)
            yield
        finally:
            if not self.queue.remove(entry) and place.is_granted:
                self._num_granted -= entry.num_sequences
            self.look()

    def refusal(self, visit: Visit, reason: str) -> QueueFull:
        """What a request is told that cannot come in, with the time when it can."""
        self.num_refused[reason] += 1
        drain = self.sequences_per_second
        seconds = self.promises.make(
            visit.keys, visit.num_sequences, drain, self._seconds_to_first_end
        )
        return QueueFull(
            f"{self.queue.num_requests} requests are waiting for an engine, which is as many as "
            f"can be served soon; try again in {seconds} s.",
            retry_after_seconds=seconds,
        )

    @property
    def tokens_per_second(self) -> float:
        return self.drain.tokens_per_second(self._places.num_running + self._num_granted)

    @property
    def sequences_per_second(self) -> float:
        """How many end, of those that run now."""
        return self.drain.sequences_per_second(self._places.num_running + self._num_granted)

    @property
    def _seconds_to_first_end(self) -> float:
        """Nothing drains while all that run have just begun."""
        first = next(iter(self._started_at.values()), None)
        if first is None:
            return 0.0
        length = self.drain.output_tokens / self.drain.tokens_per_second(1)
        return max(0.0, first + length - self._clock())

    def look(self) -> None:
        """Lets in as many as there are places for."""
        self._measure()
        num_free = self._num_free() if self.queue.num_requests else 0
        while self.queue.num_requests and num_free > 0:
            entry = self.queue.pop()
            if entry.item.granted.done():
                # Its task was told to end, and has not come to it yet.
                self.queue.settle(entry.tenant, -entry.num_tokens)
                continue
            entry.item.granted.set_result(None)
            self._num_granted += entry.num_sequences
            num_free -= entry.num_sequences
        if self.queue.num_requests and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_AGAIN_SECONDS, self._look_again)

    def look_soon(self) -> None:
        """An engine has reported: looks once the outputs that came with it were taken."""
        if not self._is_looking_soon:
            self._is_looking_soon = True
            asyncio.get_running_loop().call_soon(self._look_now)

    def _look_now(self) -> None:
        self._is_looking_soon = False
        self.look()

    def _look_again(self) -> None:
        self._timer = None
        if self._places.has_engines:
            self._saw_engines_at = self._clock()
        elif self._clock() - self._saw_engines_at > self._recovery_seconds:
            while self.queue.num_requests:
                self.queue.pop().item.fail(no_engine())
        self.look()

    def _measure(self) -> None:
        self.drain.update(self._clock(), self._places.num_running, self._num_sampled())

    def _num_free(self) -> int:
        return self._places.num_free - self._num_granted

    def _arrive(self, visit: Visit) -> None:
        """It is no longer on its way."""
        if not visit.has_arrived:
            visit.has_arrived = True
            self._num_coming -= visit.num_sequences
            self._coming[visit.tenant] -= visit.num_sequences
            if not self._coming[visit.tenant]:
                del self._coming[visit.tenant]

    def _expected_output(self, visit: Visit, max_tokens: int) -> int:
        """Of the usual length. A client's limit is often generous, and says no more than that."""
        return min(max_tokens, math.ceil(self.drain.output_tokens * visit.num_sequences))

    def _is_below_its_share(self, visit: Visit) -> bool:
        """Whether others, who have more, are to make room for it once its prompt is read."""
        tenants = self.queue.tenants | self._coming.keys()
        if not tenants - {visit.tenant}:
            return False
        own = self.queue.num_sequences_of(visit.tenant) + self._coming[visit.tenant]
        share = self._bounds.max_sequences // len(tenants | {visit.tenant})
        return not own or own + visit.num_sequences <= share

    def _make_room(self, visit: Visit, entry: Entry[Place]) -> None:
        """Sees to it that the queue may hold the request. Raises QueueFull or RequestTimeout."""
        if not self.queue.num_requests and self._num_free() > 0:
            return
        bounds, has_promised = self._bounds, self.promises.num_open > 0
        is_within_reserve = (
            self.queue.num_sequences < bounds.promised_sequences
            and self.queue.num_tokens < bounds.max_tokens
        )
        max_tokens = bounds.newcomer_tokens if has_promised else bounds.max_tokens
        pushed_out = self.queue.to_push_out(entry, bounds.max_sequences, max_tokens)
        if pushed_out is None:
            is_preferred = visit.is_promised or not self.queue.num_sequences_of(visit.tenant)
            if self.queue.num_requests and not (is_preferred and is_within_reserve):
                is_long = self.queue.num_tokens + entry.num_tokens > max_tokens
                raise self.refusal(visit, "queued_tokens" if is_long else "queued_requests")
        self._check_time(visit, entry)
        for victim in pushed_out or ():
            self.queue.remove(victim)
            victim.item.fail(self.refusal(victim.item.visit, "pushed_out"))

    def _check_time(self, visit: Visit, entry: Entry[Place]) -> None:
        """Raises RequestTimeout for a request that cannot start in time."""
        remaining = visit.deadline - self._clock()
        own = self.queue.num_sequences_of(visit.tenant)
        num_before = min(self.queue.num_sequences, own * max(1, len(self.queue.tenants)))
        seconds = num_before / self.sequences_per_second
        if self.drain.is_measured and seconds > remaining:
            self.num_refused["timeout"] += 1
            raise too_late(seconds)
