"""Writes records to Redis in the background: in batches, the latest state, without giving up."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gateway.ledger_keys import LedgerKeys
from gateway.ledger_scripts import UPDATE_INDEX, WRITE_RECORD
from gateway.records import RequestRecord
from gateway.redis_batch import FAILURES, Batch, WrongType
from gateway.redis_client import AnyRedis
from gateway.redis_state import RedisState

logger = logging.getLogger(__name__)

# Changes within this time go out in one batch.
_GATHER_SECONDS: Final = 0.01
_BATCH_RECORDS: Final = 500
# Live records are written anew this often: counts move on, and their time to live is renewed.
_REFRESH_SECONDS: Final = 5.0
# A live record of a gateway that died lapses after this long.
LIVE_TTL_SECONDS: Final = 60
_FIRST_BACKOFF_SECONDS: Final = 0.1
_LAST_BACKOFF_SECONDS: Final = 0.5
# Records that wait while Redis is away; finished ones are given up, oldest first, beyond this.
_MAX_UNWRITTEN: Final = 20_000


class LedgerWriter:
    """`run` is the one task that writes.

    `take_flag(record, flag)` gets the cancel flag that was there when a record was first written;
    `on_fenced(record)` is told of a record that another gateway has taken, and which stayed as that
    one wrote it.
    """

    def __init__(
        self,
        redis: AnyRedis,
        keys: LedgerKeys,
        ttl_seconds: int,
        state: RedisState,
        live_records: Callable[[], Iterable[RequestRecord]],
        take_flag: Callable[[RequestRecord, str | None], None],
        on_fenced: Callable[[RequestRecord], None],
    ) -> None:
        self.num_dropped = 0
        self._redis = redis
        self._keys = keys
        self._ttl_seconds = ttl_seconds
        self._state = state
        self._live_records = live_records
        self._take_flag = take_flag
        self._on_fenced = on_fenced
        self._unwritten: dict[str, RequestRecord] = {}
        # Incarnations that were written, and whose flag was looked up.
        self._begun: set[str] = set()
        # Incarnations that were handed over, and are not ours to write any more.
        self._closed: set[str] = set()
        self._wakeup = asyncio.Event()
        self._refresh_at = 0.0

    def save(self, record: RequestRecord) -> None:
        if record.incarnation in self._closed:
            return
        self._unwritten[record.id] = record
        if len(self._unwritten) > _MAX_UNWRITTEN:
            self._drop_one()
        self._wakeup.set()

    def close(self, record: RequestRecord) -> None:
        """Whatever is saved of this request from now on is not written."""
        self._closed.add(record.incarnation)
        self._unwritten.pop(record.id, None)

    def refresh(self) -> None:
        """Has every live record written again, now: Redis may have lost them."""
        self._refresh_at = 0.0
        self._wakeup.set()

    def unwritten(self, request_id: str) -> RequestRecord | None:
        """The record, if it has changed since it was last written."""
        return self._unwritten.get(request_id)

    async def run(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            if time.monotonic() >= self._refresh_at:
                self._refresh_at = time.monotonic() + _REFRESH_SECONDS
                self._save_live()
            try:
                await self._write_batch()
            except FAILURES as error:
                self._state.note_away("records", error)
                # What Redis held may be gone when it is back.
                self._refresh_at = 0.0
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)
                continue
            except Exception:
                logger.exception("records could not be written")
                await asyncio.sleep(_LAST_BACKOFF_SECONDS)
                continue
            self._state.note_there("records")
            backoff = _FIRST_BACKOFF_SECONDS
            if not self._unwritten:
                await self._until_woken()

    async def flush(self) -> None:
        """Writes what is left; one of FAILURES when Redis does not take it."""
        while self._unwritten:
            await self._write_batch()

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten)

    async def _until_woken(self) -> None:
        self._wakeup.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._refresh_at - time.monotonic()):
                await self._wakeup.wait()
        await asyncio.sleep(_GATHER_SECONDS)

    def _save_live(self) -> None:
        for record in self._live_records():
            if record.incarnation not in self._closed:
                self._unwritten[record.id] = record

    async def _write_batch(self) -> None:
        """One round trip. What fails stays unwritten."""
        records = list(self._unwritten.values())[:_BATCH_RECORDS]
        for record in records:
            del self._unwritten[record.id]
        # As they are sent; they may move on before the reply.
        live = [record.is_live for record in records]
        fresh = [record for record in records if record.incarnation not in self._begun]
        batch = Batch(self._redis)
        for record in fresh:
            batch.command("GET", self._keys.cancel(record.id))
        for record, is_live in zip(records, live, strict=True):
            add_record(
                batch, self._keys, record, LIVE_TTL_SECONDS if is_live else self._ttl_seconds
            )
        self._add_index(batch, records, live)
        try:
            replies = await batch.execute()
        except BaseException:
            for record in records:
                if record.incarnation not in self._closed:
                    self._unwritten.setdefault(record.id, record)
            raise
        self._begun.update(record.incarnation for record in fresh)
        for record, flag in zip(fresh, replies, strict=False):
            self._take_flag(record, flag if isinstance(flag, str) else None)
        for record, is_live, reply in zip(records, live, replies[len(fresh) :], strict=False):
            if not is_live:
                self._begun.discard(record.incarnation)
            self._note_reply(record, reply)

    def _add_index(
        self, batch: Batch, records: Sequence[RequestRecord], live: Sequence[bool]
    ) -> None:
        """Also the heartbeat that tells whether Redis is there when nothing has changed."""
        now = time.time()
        batch.script(
            UPDATE_INDEX,
            self._keys.live,
            now,
            now + LIVE_TTL_SECONDS,
            self._ttl_seconds,
            sum(live),
            *(record.id for record, is_live in zip(records, live, strict=True) if is_live),
            *(record.id for record, is_live in zip(records, live, strict=True) if not is_live),
        )

    def _note_reply(self, record: RequestRecord, reply: object) -> None:
        if isinstance(reply, WrongType):
            logger.error("the key of request %s is not the ledger's: %s", record.id, reply)
        elif not reply and record.incarnation not in self._closed:
            self._on_fenced(record)

    def _drop_one(self) -> None:
        for request_id, record in self._unwritten.items():
            if not record.is_live:
                del self._unwritten[request_id]
                self._begun.discard(record.incarnation)
                self.num_dropped += 1
                return


def add_record(batch: Batch, keys: LedgerKeys, record: RequestRecord, ttl_seconds: int) -> None:
    """Writes `record`, unless another owns it by now: then the reply is 0."""
    fields = [part for field in record.to_hash().items() for part in field]
    batch.script(
        WRITE_RECORD,
        keys.record(record.id),
        record.epoch,
        record.incarnation,
        record.owner,
        int(record.released or not record.is_live),
        ttl_seconds,
        *fields,
    )
