"""What Redis knows of every request: any gateway looks up, cancels, follows, goes on with it."""

import asyncio
import copy
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from gateway.cancel_channel import CancelChannel, any_incarnation
from gateway.ledger_keys import LedgerKeys
from gateway.ledger_writer import LedgerWriter
from gateway.liveness import Liveness
from gateway.records import RequestRecord, Stage
from gateway.redis_batch import FAILURES, Batch
from gateway.redis_client import AnyRedis
from gateway.redis_state import RedisState, unavailable_when_away
from gateway.run_finder import RunFinder, record_of
from gateway.run_store import Claim, RunSource, StoredCall, StoredRun
from gateway.run_writer import RunWriter

logger = logging.getLogger(__name__)

# How long a cancel waits for a request whose first record is not written yet.
_SOON_SECONDS: Final = 5
_MAX_LISTED: Final = 1000
_FLUSH_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.5
# What was sent over a connection that was given up takes effect this much after the server is back.
_LATE_SECONDS: Final = 3.0


class Ledger:
    """An async context manager; leaving it writes what is left, for a moment at most.

    `live_records` are those of this gateway, which is `owner`; `on_cancel(id, incarnation)` is
    called when any gateway cancels a request, with None for whichever has the id.
    """

    def __init__(
        self,
        redis: AnyRedis,
        prefix: str,
        ttl_seconds: int,
        live_records: Callable[[], Iterable[RequestRecord]],
        on_cancel: Callable[[str, str], None],
        owner: str,
    ) -> None:
        self.owner = owner
        self._redis = redis
        self._keys = LedgerKeys(prefix)
        self._ttl_seconds = ttl_seconds
        self._live_records = live_records
        self._state = RedisState()
        self._channel = CancelChannel(redis, self._keys, live_records, on_cancel)
        self._runs = RunWriter(redis, self._keys, ttl_seconds, self._state, self._suspect)
        self._writer = LedgerWriter(
            redis,
            self._keys,
            ttl_seconds,
            self._state,
            live_records,
            self._channel.take_flag,
            self._runs.fence,
        )
        self._liveness = Liveness(redis, self._keys, owner, self._state, self._suspect)
        self._finder = RunFinder(redis, self._keys, owner, self._is_here)
        # Incarnations of claims that are under way.
        self._claiming: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for task in (self._liveness, self._writer, self._runs, self._channel):
            self._start(task.run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            # redis-py waits with asyncio.wait_for, which may swallow a cancel.
            await asyncio.wait(self._tasks, timeout=_RETRY_SECONDS)
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._writer.flush()
                await self._runs.flush()
        except FAILURES:
            logger.warning(
                "%d records and %d runs could not be written to Redis",
                self._writer.num_unwritten,
                self._runs.num_unwritten,
            )
        await self._liveness.end()

    @property
    def available(self) -> bool:
        """Whether the last write reached Redis."""
        return self._state.available

    @property
    def num_dropped(self) -> int:
        return self._writer.num_dropped + self._runs.num_dropped

    def save(self, record: RequestRecord) -> None:
        """Has the record written soon. Never blocks and never fails."""
        self._writer.save(record)

    def track(self, source: RunSource, call: bytes) -> None:
        """Has call and log kept in Redis from now on, in the background, until it has ended."""
        stored = StoredCall(source.request_id, source.incarnation, self.owner, "", "", call)
        self._runs.track(source, stored)

    def release(self, request_id: str, epoch: int) -> None:
        """Hands a tracked request over: written as it is now, for any gateway to take.

        Nothing of it is written later; its run must give no more batches.
        """
        for record in self._live_records():
            if record.id == request_id and record.epoch == epoch:
                if self._runs.find(record.incarnation) is not None:
                    self._writer.close(record)
                    released = copy.copy(record)
                    released.released = True
                    self._runs.release(released)
                return

    async def claim(self, digest: str, body_digest: str, request_id: str, call: bytes) -> Claim:
        """Claims an idempotency key for a request, or says who has it.

        A new claim is kept until its run is tracked and has ended, or until `unclaim`.
        """
        incarnation = secrets.token_hex(8)
        own = StoredCall(request_id, incarnation, self.owner, digest, body_digest, call)
        self._claiming.add(incarnation)
        try:
            async with unavailable_when_away():
                held, is_new = await self._finder.claim(own)
            if is_new:
                self._runs.hold(own)
        finally:
            self._claiming.discard(incarnation)
        return Claim(
            held.request_id,
            held.digest,
            held.body_digest,
            is_new,
            held.incarnation,
            held.owner,
            held.call,
        )

    def unclaim(self, digest: str) -> None:
        """Gives a claim up again, soon: its request was refused, or has ended with an error that
        need not come again.
        """
        kept = self._runs.find_claim(digest)
        if kept is not None and (kept.source is None or kept.source.ended):
            self._runs.forget(kept.call.incarnation)
            self._start(_until_done(lambda: self._finder.unclaim(kept.call)))

    async def find_run(self, request_id: str, claim: Claim | None = None) -> StoredRun | None:
        """What is left of a run; `claim`, one that has it, stands in for what is lost."""
        claimed = None
        if claim is not None:
            claimed = StoredCall(
                claim.request_id,
                claim.incarnation,
                claim.owner,
                claim.digest,
                claim.body_digest,
                claim.call,
            )
        async with unavailable_when_away():
            return await self._finder.find(request_id, claimed)

    async def read_batches(
        self, request_id: str, incarnation: str, epoch: int, start: int
    ) -> list[bytes]:
        """The batches from number `start` on that the owner of `epoch` has written so far."""
        async with unavailable_when_away():
            return await self._finder.batches(request_id, incarnation, epoch, start)

    async def take_over(self, stored: StoredRun) -> int | None:
        """Makes this gateway the owner; the new epoch, or None when another was faster.

        Its run is to be tracked now, under the same incarnation.
        """
        epoch = await self._take(stored.request_id, stored.incarnation, stored.epoch, stored.owner)
        if epoch is not None:
            self._runs.hold(
                StoredCall(
                    stored.request_id,
                    stored.incarnation,
                    stored.owner,
                    stored.digest,
                    stored.body_digest,
                    stored.call,
                )
            )
        return epoch

    async def find(self, request_id: str) -> RequestRecord | None:
        """The record of any gateway's request. Raises Unavailable while Redis is away."""
        unwritten = self._writer.unwritten(request_id)
        if unwritten is not None:
            return unwritten
        async with unavailable_when_away():
            fields: Any = await self._redis.hgetall(self._keys.record(request_id))
            return record_of(fields)

    async def list_live(self) -> list[RequestRecord]:
        """Live requests of all gateways. Raises Unavailable while Redis is away."""
        async with unavailable_when_away():
            ids: Any = await self._redis.zrangebyscore(
                self._keys.live, time.time(), "+inf", start=0, num=_MAX_LISTED
            )
            batch = Batch(self._redis)
            for request_id in ids:
                batch.command("HGETALL", self._keys.record(request_id))
            records = [record_of(fields) for fields in await batch.execute()]
        return [record for record in records if record is not None and record.is_live]

    async def request_cancel(self, record: RequestRecord) -> None:
        """Tells the request's gateway, now or when it is back; of one whose gateway is gone, notes
        the end itself. Unavailable while Redis is away.
        """
        await self._flag([record.id], record.incarnation, self._ttl_seconds)
        async with unavailable_when_away():
            is_lost = await self._finder.is_lost(record)
        if not is_lost:
            return
        epoch = await self._take(record.id, record.incarnation, record.epoch, record.owner)
        if epoch is not None:
            ended = copy.copy(record)
            ended.epoch, ended.owner, ended.released = epoch, self.owner, False
            ended.state, ended.finish_reason = Stage.FINISHED, "cancelled"
            ended.finished_at = time.time()
            self.save(ended)

    async def request_cancel_soon(self, request_ids: Sequence[str], tenant: str) -> None:
        """Cancels requests of these ids that are just beginning somewhere."""
        await self._flag(request_ids, any_incarnation(tenant), _SOON_SECONDS)

    async def _flag(self, request_ids: Sequence[str], incarnation: str, ttl_seconds: int) -> None:
        async with unavailable_when_away():
            batch = Batch(self._redis)
            for request_id in request_ids:
                batch.command("SET", self._keys.cancel(request_id), incarnation, "EX", ttl_seconds)
            for request_id in request_ids:
                batch.publish(self._keys.channel, f"{incarnation} {request_id}")
            await batch.execute()

    async def _take(self, request_id: str, incarnation: str, epoch: int, owner: str) -> int | None:
        attempt = secrets.token_hex(8)
        try:
            async with unavailable_when_away():
                return await self._finder.take_over(request_id, incarnation, epoch, owner, attempt)
        except BaseException:
            # It may have succeeded, or still will, and then nobody would have the request.
            self._start(_until_done(lambda: self._finder.give_back(request_id, attempt)))
            raise

    def _suspect(self) -> None:
        self._writer.refresh()
        self._runs.suspect()

    def _is_here(self, incarnation: str) -> bool:
        return (
            incarnation in self._claiming
            or self._runs.find(incarnation) is not None
            or any(record.incarnation == incarnation for record in self._live_records())
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _until_done(attempt: Callable[[], Awaitable[bool]]) -> None:
    """Tries until Redis has answered yes, or has answered no for as long as it may be late."""
    patience_seconds = _LATE_SECONDS
    while patience_seconds > 0:
        try:
            if await attempt():
                return
        except FAILURES:
            pass
        else:
            patience_seconds -= _RETRY_SECONDS
        await asyncio.sleep(_RETRY_SECONDS)
