"""Ledgers of several gateways on one Redis, and runs for them that tests write by hand."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from redis.asyncio import Redis

from gateway.ledger import Ledger
from gateway.records import RequestRecord, Stage
from gateway.redis_client import open_redis
from gateway.run_store import StoredRun
from tests.fakes.gateway_line import eventually

PREFIX = "t:"
TTL_SECONDS = 600
OWNER_A, OWNER_B = "a:1#aaaaaaaa01", "b:1#bbbbbbbb01"


def make_record(request_id: str = "one", owner: str = "", **fields: object) -> RequestRecord:
    """A live record, as a gateway has it a moment after the start."""
    return RequestRecord(
        **{
            "id": request_id,
            "incarnation": f"inc-{request_id}",
            "owner": owner,
            "endpoint": "/v1/chat/completions",
            "model": "tiny",
            "seed": 7,
            "num_choices": 1,
            "preprocessing_at": time.time(),
            **fields,
        }  # type: ignore[arg-type]
    )


@dataclass
class FakeRun:
    """A run whose batches are what the test says."""

    request_id: str = "one"
    incarnation: str = "inc-one"
    epoch: int = 1
    written: list[bytes] = field(default_factory=list)
    ended: bool = False
    num_fenced: int = 0

    def batches(self, start: int) -> list[bytes]:
        return self.written[start:]

    def fenced(self) -> None:
        self.num_fenced += 1


@dataclass
class LedgerSide:
    """One gateway's share: its ledger, its live records, what it was told to cancel."""

    ledger: Ledger
    records: list[RequestRecord]
    cancelled: list[tuple[str, str | None]]
    is_dead: bool = False

    def begin(self, request_id: str = "one", **fields: object) -> RequestRecord:
        """A new live record of this gateway, saved."""
        record = make_record(request_id, self.ledger.owner, **fields)
        self.records.append(record)
        self.ledger.save(record)
        return record

    def finish(self, record: RequestRecord, reason: str = "stop") -> None:
        record.state, record.finish_reason = Stage.FINISHED, reason
        self.records.remove(record)
        self.ledger.save(record)

    async def die(self) -> None:
        """As SIGKILL: nothing more is written. Its liveness key lapses by itself."""
        tasks = list(self.ledger._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.is_dead = True


@asynccontextmanager
async def ledger_side(url: str, owner: str, prefix: str = PREFIX) -> AsyncIterator[LedgerSide]:
    records: list[RequestRecord] = []
    cancelled: list[tuple[str, str | None]] = []
    async with open_redis(url) as redis:
        ledger = Ledger(
            redis,
            prefix,
            TTL_SECONDS,
            lambda: records,
            lambda request_id, incarnation: cancelled.append((request_id, incarnation)),
            owner,
        )
        side = LedgerSide(ledger, records, cancelled)
        await ledger.__aenter__()
        try:
            yield side
        finally:
            if not side.is_dead:
                await ledger.__aexit__(None, None, None)


async def found_run(ledger: Ledger, request_id: str = "one") -> StoredRun:
    run = await ledger.find_run(request_id)
    assert run is not None
    return run


async def die_and_lapse(side: LedgerSide, redis: Redis, prefix: str) -> None:
    """As SIGKILL, and its liveness key has lapsed since."""
    await side.die()
    await redis.delete(f"{prefix}gateway:{side.ledger.owner}")


async def begin_run(side: LedgerSide, *batches: bytes) -> FakeRun:
    """A run of that side, and these batches of it in Redis."""
    record = side.begin()
    run = FakeRun(incarnation=record.incarnation, written=list(batches))
    side.ledger.track(run, b"call")

    async def ask() -> StoredRun | None:
        return await side.ledger.find_run("one")

    await eventually(
        ask, lambda stored: stored is not None and stored.batches == list(batches)
        and stored.record is not None,
    )  # fmt: skip
    return run
