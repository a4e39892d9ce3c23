"""Listens for cancels from any gateway, and looks up those that were missed meanwhile."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from gateway.ledger_keys import LedgerKeys
from gateway.records import RequestRecord
from gateway.redis_batch import FAILURES
from gateway.redis_client import AnyRedis

logger = logging.getLogger(__name__)

# A subscription that has been silent this long is asked for a sign of life; twice, and it is dead.
_SILENCE_SECONDS: Final = 1.0
_BACKOFF_SECONDS: Final = 0.5


def any_incarnation(tenant: str) -> str:
    """Stands, in a flag and in a message, for whichever request of the tenant has the id."""
    return f"*{tenant}"


def is_meant(record: RequestRecord, incarnation: str) -> bool:
    """Whether a flag or message with this `incarnation` and the record's id is about it."""
    return incarnation in (record.incarnation, any_incarnation(record.tenant))


class CancelChannel:
    """`run` is the one task that listens, on its own connection."""

    def __init__(
        self,
        redis: AnyRedis,
        keys: LedgerKeys,
        live_records: Callable[[], Iterable[RequestRecord]],
        on_cancel: Callable[[str, str], None],
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._live_records = live_records
        self._on_cancel = on_cancel

    def take_flag(self, record: RequestRecord, flag: str | None) -> None:
        """Cancels `record`'s request when the durable flag means it."""
        if flag is not None and is_meant(record, flag):
            self._on_cancel(record.id, record.incarnation)

    async def run(self) -> None:
        while True:
            pubsub = self._redis.pubsub()
            try:
                # A Cluster's subscriptions do not look for its nodes by themselves.
                await self._redis.initialize()
                await pubsub.subscribe(self._keys.channel)
                await self._listen(pubsub)
            except FAILURES as error:
                logger.debug("the cancel channel broke: %s", error)
            except Exception:
                logger.exception("the cancel channel failed")
            finally:
                await _close(pubsub)
            await asyncio.sleep(_BACKOFF_SECONDS)

    async def _listen(self, pubsub: Any) -> None:
        """Until the connection breaks or is found dead."""
        silent = False
        while True:
            message = await pubsub.get_message(timeout=_SILENCE_SECONDS)
            if message is None:
                if silent:
                    raise TimeoutError("no sign of life")
                silent = True
                await pubsub.ping()
                continue
            silent = False
            if message["type"] == "subscribe":
                # Also after redis-py has reconnected by itself: look up what was missed.
                await self._look_up_flags()
            elif message["type"] == "message":
                # Ids hold no blanks; names of API keys may.
                incarnation, _, request_id = message["data"].rpartition(" ")
                self._on_cancel(request_id, incarnation)

    async def _look_up_flags(self) -> None:
        records = list(self._live_records())
        if not records:
            return
        pipeline: Any = self._redis.pipeline(transaction=False)
        for record in records:
            pipeline.get(self._keys.cancel(record.id))
        for record, flag in zip(records, await pipeline.execute(), strict=True):
            self.take_flag(record, flag)


async def _close(pubsub: Any) -> None:
    try:
        await pubsub.aclose()
    except FAILURES as error:
        logger.debug("closing the cancel channel: %s", error)
