"""Writes records to Redis in the background: in batches, the latest state, without giving up."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from redis.exceptions import RedisError

from gateway.ledger_keys import LedgerKeys
from gateway.records import RequestRecord
from gateway.redis_client import AnyRedis

logger = logging.getLogger(__name__)

# Changes within this time go out in one batch.
_GATHER_SECONDS: Final = 0.01
_BATCH_RECORDS: Final = 500
# Live records are written anew this often: counts move on, and their time to live is renewed.
_REFRESH_SECONDS: Final = 5.0
# A live record of a gateway that died lapses after this long.
_LIVE_TTL_SECONDS: Final = 60
_FIRST_BACKOFF_SECONDS: Final = 0.1
_LAST_BACKOFF_SECONDS: Final = 2.0
_FLUSH_SECONDS: Final = 2.0
# Records that wait while Redis is away; finished ones are given up, oldest first, beyond this.
_MAX_UNWRITTEN: Final = 20_000

_FAILURES: Final = (RedisError, OSError, TimeoutError)


class LedgerWriter:
    """`run` is the one task that writes. `take_flag(record, flag)` gets the cancel flag that was
    there when a record was first written.
    """

    def __init__(
        self,
        redis: AnyRedis,
        keys: LedgerKeys,
        ttl_seconds: int,
        live_records: Callable[[], Iterable[RequestRecord]],
        take_flag: Callable[[RequestRecord, str | None], None],
    ) -> None:
        self.available = False
        self.num_dropped = 0
        self._redis = redis
        self._keys = keys
        self._ttl_seconds = ttl_seconds
        self._live_records = live_records
        self._take_flag = take_flag
        self._unwritten: dict[str, RequestRecord] = {}
        # Incarnations whose key was made by us, so that it holds nothing of an older request.
        self._begun: set[str] = set()
        self._wakeup = asyncio.Event()
        self._reported_away = False

    def save(self, record: RequestRecord) -> None:
        self._unwritten[record.id] = record
        if len(self._unwritten) > _MAX_UNWRITTEN:
            self._drop_one()
        self._wakeup.set()

    def unwritten(self, request_id: str) -> RequestRecord | None:
        """The record, if it has changed since it was last written."""
        return self._unwritten.get(request_id)

    async def run(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        refresh_at = 0.0
        while True:
            if time.monotonic() >= refresh_at:
                self._save_live()
                refresh_at = time.monotonic() + _REFRESH_SECONDS
            try:
                await self._write_batch()
            except _FAILURES as error:
                self._note_away(error)
                # What Redis held may be gone when it is back.
                refresh_at = 0.0
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)
                continue
            self._note_there()
            backoff = _FIRST_BACKOFF_SECONDS
            if not self._unwritten:
                self._wakeup.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wakeup.wait(), refresh_at - time.monotonic())
                await asyncio.sleep(_GATHER_SECONDS)

    async def flush(self) -> None:
        """Writes what is left, while Redis takes it."""
        with contextlib.suppress(*_FAILURES):
            async with asyncio.timeout(_FLUSH_SECONDS):
                while self._unwritten:
                    await self._write_batch()
        if self._unwritten:
            logger.warning("%d records could not be written to Redis", len(self._unwritten))

    def _save_live(self) -> None:
        for record in self._live_records():
            self._unwritten[record.id] = record

    async def _write_batch(self) -> None:
        """One round trip. What fails stays unwritten."""
        batch = list(self._unwritten.values())[:_BATCH_RECORDS]
        for record in batch:
            del self._unwritten[record.id]
        try:
            fresh = [record for record in batch if record.incarnation not in self._begun]
            live = [record for record in batch if record.is_live]
            ended = [record for record in batch if not record.is_live]
            results = await self._pipeline(fresh, live, ended).execute()
        except BaseException:
            for record in batch:
                self._unwritten.setdefault(record.id, record)
            raise
        self._begun.update(record.incarnation for record in fresh)
        self._begun.difference_update(record.incarnation for record in ended)
        for record, flag in zip(fresh, results[1 : 1 + 2 * len(fresh) : 2], strict=True):
            self._take_flag(record, flag)

    def _pipeline(
        self,
        fresh: Sequence[RequestRecord],
        live: Sequence[RequestRecord],
        ended: Sequence[RequestRecord],
    ) -> Any:
        """The commands of one batch: first DEL and GET of each fresh record, then all states."""
        pipeline: Any = self._redis.pipeline(transaction=False)
        for record in fresh:
            pipeline.delete(self._keys.record(record.id))
            pipeline.get(self._keys.cancel(record.id))
        for records, ttl_seconds in ((live, _LIVE_TTL_SECONDS), (ended, self._ttl_seconds)):
            for record in records:
                key = self._keys.record(record.id)
                pipeline.hset(key, mapping=record.to_hash())
                pipeline.expire(key, ttl_seconds)
        now = time.time()
        if live:
            lapse = now + _LIVE_TTL_SECONDS
            pipeline.zadd(self._keys.live, {record.id: lapse for record in live})
        if ended:
            pipeline.zrem(self._keys.live, *(record.id for record in ended))
        # Also the heartbeat that tells whether Redis is there when nothing has changed.
        pipeline.zremrangebyscore(self._keys.live, "-inf", now)
        pipeline.expire(self._keys.live, self._ttl_seconds)
        return pipeline

    def _drop_one(self) -> None:
        for request_id, record in self._unwritten.items():
            if not record.is_live:
                del self._unwritten[request_id]
                self.num_dropped += 1
                return

    def _note_away(self, error: BaseException) -> None:
        self.available = False
        if not self._reported_away:
            self._reported_away = True
            logger.warning("Redis is away, streams go on: %s", error)

    def _note_there(self) -> None:
        self.available = True
        if self._reported_away:
            self._reported_away = False
            logger.info("Redis is back")
