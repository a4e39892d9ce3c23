"""One request as this gateway has it: generated here, or followed where it is generated."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from gateway.call import Call
from gateway.errors import ClientDisconnected, HandedOver, as_typed
from gateway.followed_log import FollowedLog
from gateway.interruption import Interruptible
from gateway.job import Job
from gateway.ledger import Ledger
from gateway.output_log import OutputLog
from gateway.pipeline import Pipeline
from gateway.run_store import Claim, StoredRun
from gateway.seat import Seat
from protos.wire.errors import InternalError, Overloaded, TokenlineError, Unavailable

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
# How often one who follows a run looks whether its gateway still lives.
_LOOK_SECONDS: Final = 0.5
# An owner's record is written within a moment. A claim that has none for so long came about while
# its gateway had given up on Redis: nobody has the run.
_NO_RECORD_SECONDS: Final = 1.0
# A Redis that has lost everything is told again by the gateways that live, within this time.
_LOST_SECONDS: Final = 10.0


class _Fenced(Exception):
    """Another gateway has taken the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a run comes from. stored: it is another gateway's, or was. claim: on its key."""

    incarnation: str
    claim: Claim | None = None
    stored: StoredRun | None = None


class Run:
    """The job of one call, and the log that it fills. A RunSource of the ledger.

    Its task generates while the run is this gateway's own, and otherwise follows the gateway whose
    it is, and takes the run over when that has gone. Those who read the log need not know which.
    """

    def __init__(
        self, call: Call, job: Job, origin: Origin, ledger: Ledger, pipeline: Pipeline
    ) -> None:
        self.call = call
        self.job = job
        self.request_id = call.request_id
        self.incarnation = origin.incarnation
        self.epoch = 1 if origin.stored is None else origin.stored.epoch
        # Nobody can come back to a whole answer without a key.
        retains = job.streams or self._outlives_readers
        self.log = OutputLog(job.num_sequences, retains=retains)
        self._origin = origin
        self._stored = origin.stored
        self._ledger = ledger
        self._pipeline = pipeline
        self._is_ours = origin.stored is None
        self._is_tracked = False
        self._generating: Interruptible | None = None
        self._num_readers = 0
        # Nobody reads it and it is not to go on here: no one else may join it.
        self.is_left = False
        self._reason_to_stop: TokenlineError = ClientDisconnected()
        self.task = asyncio.create_task(self._work())

    @property
    def ended(self) -> bool:
        """Whether no batch follows."""
        return self.log.ended

    def batches(self, start: int) -> list[bytes]:
        return self.log.batches(start)

    def fenced(self) -> None:
        """Another gateway has taken the request: what was begun here is aborted, without a word."""
        logger.warning("another gateway has taken request %s", self.request_id)
        self._is_ours = self._is_tracked = False
        if not self._num_readers:
            self.is_left = True
            self.task.cancel()
        elif self._generating is not None:
            self._generating.interrupt(_Fenced())

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """While somebody reads the log. The last one's leaving ends a run without a key."""
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers and not (self._is_ours and self._outlives_readers):
                self.is_left = not self.log.ended
                self.stop()

    def stop(self, reason: TokenlineError | None = None) -> None:
        """Aborts the run here. `reason` is told to those who still read."""
        if not self.log.ended:
            self._reason_to_stop = reason or self._reason_to_stop
            self.task.cancel()

    def hand_over(self) -> None:
        """Leaves the run to another gateway, where that is possible, and its readers with it."""
        if self.log.ended or not self.log.retains:
            return
        if self._is_ours:
            if not (self._is_tracked or self.call.key_digest):
                return
            self._ledger.release(self.request_id, self.epoch)
        self.log.break_off(HandedOver())
        self.task.cancel()

    @property
    def _outlives_readers(self) -> bool:
        return self.job.is_detached or bool(self.call.key_digest)

    async def _work(self) -> None:
        error: TokenlineError | None = None
        try:
            while not self.log.ended:
                await (self._generate() if self._is_ours else self._follow())
        except TokenlineError as failure:
            error = failure
        except asyncio.CancelledError:
            error = self._reason_to_stop
            raise
        except Exception as failure:
            error = as_typed(failure)
        finally:
            self.log.end(error)
            if error is not None and self.call.key_digest:
                if not _is_answer(error):
                    self._ledger.unclaim(self.call.key_digest)
                elif self._is_ours:
                    # It may have ended before it had started; its claim needs an end to show.
                    self._track()

    async def _generate(self) -> None:
        """Until the run has ended here, or another gateway has taken it."""
        stored = self._stored
        seat = Seat(
            incarnation=self.incarnation,
            epoch=self.epoch,
            taken=stored.record if stored is not None else None,
            on_start=self._track,
        )
        try:
            async with Interruptible() as self._generating:
                await self._pipeline.run(self.job, self.log, seat)
        except _Fenced:
            return
        finally:
            self._generating = None
        self.log.end()

    def _track(self) -> None:
        if self.log.retains and not self._is_tracked:
            self._is_tracked = True
            self._ledger.track(self, self.call.encode())

    async def _follow(self) -> None:
        """Reads along where the run is generated, until it has ended or is ours."""
        followed: FollowedLog | None = None
        time_of = asyncio.get_running_loop().time
        awaited_until = time_of() + _NO_RECORD_SECONDS
        while not self.log.ended:
            stored = self._stored or await self._find()
            self._stored = None
            if followed is None or stored.epoch != self.epoch:
                self.epoch = stored.epoch
                followed = FollowedLog(self.log)
            followed.take(stored.batches[followed.num_batches :])
            if stored.ended and not self.log.ended:
                raise InternalError("What is kept of this request is not whole.")
            is_there = stored.owner_alive and (
                stored.record is not None or time_of() < awaited_until
            )
            if not is_there and not self.log.ended and await self._take_over(stored):
                return
            await self._read_along(followed)

    async def _read_along(self, followed: FollowedLog) -> None:
        """For a moment, or to the end."""
        for _ in range(round(_LOOK_SECONDS / _POLL_SECONDS)):
            if self.log.ended:
                return
            await asyncio.sleep(_POLL_SECONDS)
            try:
                batches = await self._ledger.read_batches(
                    self.request_id, self.incarnation, self.epoch, followed.num_batches
                )
            except Unavailable:
                continue
            followed.take(batches)

    async def _find(self) -> StoredRun:
        """What Redis has of the run; waits for Redis. Raises Unavailable when it has nothing."""
        loop = asyncio.get_running_loop()
        missed_at: float | None = None
        while missed_at is None or loop.time() < missed_at + _LOST_SECONDS:
            try:
                stored = await self._ledger.find_run(self.request_id, self._origin.claim)
            except Unavailable:
                missed_at = None
            else:
                if stored is not None and stored.incarnation == self.incarnation:
                    return stored
                missed_at = missed_at or loop.time()
            await asyncio.sleep(_POLL_SECONDS)
        raise Unavailable("The request was lost; send it again.", code="request_lost")

    async def _take_over(self, stored: StoredRun) -> bool:
        """Whether the run is ours now."""
        try:
            epoch = await self._ledger.take_over(stored)
        except Unavailable:
            return False
        if epoch is None:
            return False
        logger.info("took request %s over, epoch %d", self.request_id, epoch)
        self.epoch = epoch
        self._stored = stored
        self._is_ours = True
        self._track()
        return True


def _is_answer(error: TokenlineError) -> bool:
    """Whether the error is what the request comes to, whenever it is sent."""
    is_ours = error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return not is_ours and not isinstance(error, Overloaded)
