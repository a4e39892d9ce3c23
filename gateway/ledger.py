"""The record of every request in Redis: any gateway looks up and cancels, nobody waits for it."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from redis.exceptions import RedisError

from gateway.cancel_channel import ANY_INCARNATION, CancelChannel
from gateway.ledger_keys import LedgerKeys
from gateway.ledger_writer import LedgerWriter
from gateway.records import RequestRecord
from gateway.redis_client import AnyRedis
from gateway.run_store import Claim, RunSource, StoredRun
from protos.wire.errors import Unavailable

# How long a cancel waits for a request whose first record is not written yet.
_SOON_SECONDS: Final = 5
_MAX_LISTED: Final = 1000


class Ledger:
    """An async context manager; leaving it writes what is left, for a moment at most.

    `live_records` are those of this gateway; `on_cancel(id, incarnation)` is called when any
    gateway cancels a request, with None for whichever has the id.
    """

    def __init__(
        self,
        redis: AnyRedis,
        prefix: str,
        ttl_seconds: int,
        live_records: Callable[[], Iterable[RequestRecord]],
        on_cancel: Callable[[str, str | None], None],
        owner: str = "",
    ) -> None:
        self.owner = owner
        self._redis = redis
        self._keys = LedgerKeys(prefix)
        self._ttl_seconds = ttl_seconds
        self._channel = CancelChannel(redis, self._keys, live_records, on_cancel)
        self._writer = LedgerWriter(
            redis, self._keys, ttl_seconds, live_records, self._channel.take_flag
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._writer.run()),
            asyncio.create_task(self._channel.run()),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._writer.flush()

    @property
    def available(self) -> bool:
        """Whether the last write reached Redis."""
        return self._writer.available

    @property
    def num_dropped(self) -> int:
        return self._writer.num_dropped

    def save(self, record: RequestRecord) -> None:
        """Has the record written soon. Never blocks and never fails."""
        self._writer.save(record)

    async def find(self, request_id: str) -> RequestRecord | None:
        """The record of any gateway's request. Raises Unavailable while Redis is away."""
        unwritten = self._writer.unwritten(request_id)
        if unwritten is not None:
            return unwritten
        async with _unavailable_when_away():
            fields: Any = await self._redis.hgetall(self._keys.record(request_id))
            return RequestRecord.from_hash(fields) if fields else None

    def track(self, source: RunSource, call: bytes) -> None:
        """Has call and log kept in Redis from now on, in the background, until it has ended."""

    def release(self, request_id: str, epoch: int) -> None:
        """Hands a live request over: written as it is now, for another gateway to take.

        Nothing of it is written later; its run must give no more batches.
        """

    def unclaim(self, digest: str) -> None:
        """Gives a new claim up again, soon: its request was refused before it began."""

    async def claim(self, digest: str, body_digest: str, request_id: str, call: bytes) -> Claim:
        """Claims an idempotency key for a request, or says who has it."""
        return Claim(request_id, body_digest, True, secrets.token_hex(8), self.owner, call)

    async def find_run(self, request_id: str, claim: Claim | None = None) -> StoredRun | None:
        """What is left of a run; `claim`, one that has it, stands in for what is lost."""
        return None

    async def read_batches(
        self, request_id: str, incarnation: str, epoch: int, start: int
    ) -> list[bytes]:
        """The batches from number `start` on that the owner of `epoch` has written so far."""
        return []

    async def take_over(self, stored: StoredRun) -> int | None:
        """Makes this gateway the owner; the new epoch, or None when another was faster."""
        return None

    async def list_live(self) -> list[RequestRecord]:
        """Live requests of all gateways. Raises Unavailable while Redis is away."""
        async with _unavailable_when_away():
            ids: Any = await self._redis.zrangebyscore(
                self._keys.live, time.time(), "+inf", start=0, num=_MAX_LISTED
            )
            pipeline = self._redis.pipeline(transaction=False)
            for request_id in ids:
                pipeline.hgetall(self._keys.record(request_id))
            hashes = await pipeline.execute() if ids else []
            records = [RequestRecord.from_hash(fields) for fields in hashes if fields]
        return [record for record in records if record.is_live]

    async def request_cancel(self, request_id: str, incarnation: str) -> None:
        """Tells the request's gateway, now or when it is back. Unavailable while Redis is away."""
        await self._flag([request_id], incarnation, self._ttl_seconds)

    async def request_cancel_soon(self, request_ids: Sequence[str]) -> None:
        """Cancels requests of these ids that are just beginning somewhere."""
        await self._flag(request_ids, ANY_INCARNATION, _SOON_SECONDS)

    async def _flag(self, request_ids: Sequence[str], incarnation: str, ttl_seconds: int) -> None:
        async with _unavailable_when_away():
            pipeline = self._redis.pipeline(transaction=False)
            for request_id in request_ids:
                pipeline.set(self._keys.cancel(request_id), incarnation, ex=ttl_seconds)
            await pipeline.execute()
            for request_id in request_ids:
                await self._redis.publish(self._keys.channel, f"{incarnation} {request_id}")


@asynccontextmanager
async def _unavailable_when_away() -> AsyncIterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(
            "The request ledger (Redis) cannot be reached now; try again. Streams go on.",
            code="ledger_unavailable",
        ) from error
    except msgspec.ValidationError as error:
        raise Unavailable(
            "The request ledger holds a record of another version.", code="ledger_unavailable"
        ) from error
