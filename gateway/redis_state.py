"""Whether Redis is there, as those who use it find: said once when it goes, once when it comes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from gateway.redis_batch import FAILURES
from protos.wire.errors import Unavailable

logger = logging.getLogger(__name__)

# What asks for something in Redis waits this long for it.
_BOUND_SECONDS: Final = 1.0


class RedisState:
    """`note_away` and `note_there` are told by the tasks that write, each under its own name."""

    def __init__(self) -> None:
        self._seen = False
        self._failing: set[str] = set()

    @property
    def available(self) -> bool:
        """Whether the last of everyone's writes reached Redis."""
        return self._seen and not self._failing

    def note_away(self, task: str, error: BaseException) -> None:
        if not self._failing:
            # Some time-outs have nothing to say.
            logger.warning("Redis is away, streams go on: %s", error or type(error).__name__)
        self._failing.add(task)

    def note_there(self, task: str) -> None:
        self._seen = True
        if task in self._failing:
            self._failing.discard(task)
            if not self._failing:
                logger.info("Redis is back")


@asynccontextmanager
async def unavailable_when_away() -> AsyncIterator[None]:
    """Ends the block with Unavailable when Redis does not answer it in time."""
    try:
        async with asyncio.timeout(_BOUND_SECONDS):
            yield
    except FAILURES as error:
        raise Unavailable(
            "The request ledger (Redis) cannot be reached now; try again. Streams go on.",
            code="ledger_unavailable",
        ) from error
    except msgspec.MsgspecError as error:
        raise Unavailable(
            "The request ledger holds a record of another version.", code="ledger_unavailable"
        ) from error
