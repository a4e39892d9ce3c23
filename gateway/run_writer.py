"""Keeps the runs of this gateway in Redis, in the background: claim, call and log of each."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from gateway.kept_run import KeptRun
from gateway.ledger_keys import LedgerKeys
from gateway.records import RequestRecord
from gateway.redis_batch import FAILURES, Batch
from gateway.redis_client import AnyRedis
from gateway.redis_state import RedisState
from gateway.run_store import RunSource, StoredCall

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS: Final = 0.25
_BACKOFF_SECONDS: Final = 0.5
# What goes out in one round trip, about.
_MAX_ROUND_BYTES: Final = 4 << 20
# Runs that have ended and wait while Redis is away; the oldest are given up beyond this.
_MAX_ENDED: Final = 1000
# Redis may lose single keys all the time, where it evicts.
_SUSPICION_SECONDS: Final = 1.0


class RunWriter:
    """`run` is the one task that writes. `on_loss` is told when Redis has lost something."""

    def __init__(
        self,
        redis: AnyRedis,
        keys: LedgerKeys,
        ttl_seconds: int,
        state: RedisState,
        on_loss: Callable[[], None],
    ) -> None:
        self.num_dropped = 0
        self._redis = redis
        self._keys = keys
        self._ttl_seconds = ttl_seconds
        self._state = state
        self._on_loss = on_loss
        self._suspected_at = 0.0
        # By incarnation, oldest first.
        self._kept: dict[str, KeptRun] = {}
        self._has_begun = asyncio.Event()

    def find(self, incarnation: str) -> KeptRun | None:
        return self._kept.get(incarnation)

    def find_claim(self, digest: str) -> KeptRun | None:
        return next((kept for kept in self._kept.values() if kept.call.digest == digest), None)

    def hold(self, call: StoredCall) -> None:
        """Keeps the claim of a run that is about to begin here, or to go on."""
        before = self._kept.get(call.incarnation)
        self._keep(KeptRun(call, self._keys, self._ttl_seconds))
        if before is not None:
            before.fence()

    def forget(self, incarnation: str) -> None:
        self._kept.pop(incarnation, None)

    def track(self, source: RunSource, call: StoredCall) -> None:
        """Keeps the run; the claim that it was held with stays its own."""
        before = self._kept.get(source.incarnation)
        if before is not None and before.source is None:
            before.source = source
        else:
            self._keep(KeptRun(call, self._keys, self._ttl_seconds, source))
            if before is not None and before.source is not source:
                before.fence()
        self._drop_some()

    def release(self, record: RequestRecord) -> None:
        """Writes the rest of a run, and then that anyone may take it."""
        self._kept[record.incarnation].released = record

    def fence(self, record: RequestRecord) -> None:
        """Lets go of a run that another gateway has taken."""
        kept = self._kept.get(record.incarnation)
        if kept is not None and (kept.source is None or kept.source.epoch == record.epoch):
            del self._kept[record.incarnation]
            kept.fence()

    def suspect(self) -> None:
        """Looks whether Redis still has everything, and writes again what it has lost."""
        for kept in self._kept.values():
            kept.check()

    async def run(self) -> None:
        while True:
            try:
                more = await self.write()
            except FAILURES as error:
                self._state.note_away("runs", error)
                self.suspect()
                self._drop_some()
                await asyncio.sleep(_BACKOFF_SECONDS)
                continue
            except Exception:
                logger.exception("runs could not be written")
                await asyncio.sleep(_BACKOFF_SECONDS)
                continue
            self._state.note_there("runs")
            if not self._kept:
                self._has_begun.clear()
                await self._has_begun.wait()
            await asyncio.sleep(0 if more else _INTERVAL_SECONDS)

    async def flush(self) -> None:
        """Writes what is left; one of FAILURES when Redis does not take it."""
        while await self.write():
            pass

    async def write(self) -> bool:
        """One round trip; whether there is more to write."""
        batch = Batch(self._redis)
        now = time.monotonic()
        added: list[KeptRun] = []
        num_bytes = 0
        more = False
        for kept in list(self._kept.values()):
            if num_bytes > _MAX_ROUND_BYTES:
                more = True
                break
            try:
                num_bytes += kept.add_to(batch, now)
            except Exception:
                logger.exception("the log of request %s cannot be read", kept.call.request_id)
                self.forget(kept.call.incarnation)
            else:
                added.append(kept)
        replies = await batch.execute()
        lost = False
        for kept in added:
            kept.take(replies, now)
            lost = lost or kept.lost
            more = more or kept.has_more
            if kept.done and self._kept.get(kept.call.incarnation) is kept:
                del self._kept[kept.call.incarnation]
        if lost and now - self._suspected_at > _SUSPICION_SECONDS:
            self._suspected_at = now
            self._on_loss()
        return more

    @property
    def num_unwritten(self) -> int:
        """Runs that have ended or were handed over, but not in Redis yet."""
        return sum(kept.ending for kept in self._kept.values())

    def _keep(self, kept: KeptRun) -> None:
        self._kept[kept.call.incarnation] = kept
        self._has_begun.set()

    def _drop_some(self) -> None:
        ended = [kept for kept in self._kept.values() if kept.ending]
        for kept in ended[: max(0, len(ended) - _MAX_ENDED)]:
            self.num_dropped += 1
            self.forget(kept.call.incarnation)
