"""Runs whose gateway is gone: taken over by one, fenced, handed over, cancelled."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.run_finder import RunFinder
from protos.wire.errors import Unavailable
from tests.fakes.gateway_line import eventually
from tests.fakes.ledgers import (
    OWNER_A,
    OWNER_B,
    FakeRun,
    LedgerSide,
    begin_run,
    die_and_lapse,
    found_run,
    ledger_side,
)
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until


async def test_a_run_whose_owner_is_gone_is_taken_by_one_and_written_on(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    await begin_run(one, b"a", b"b")
    await die_and_lapse(one, redis, redis_prefix)
    stored = await found_run(two.ledger)
    assert not stored.owner_alive
    assert stored.batches == [b"a", b"b"]
    epochs = await asyncio.gather(*(two.ledger.take_over(stored) for _ in range(4)))
    assert sorted(epochs, key=str) == [2, None, None, None]
    # Until the new owner has written anything, the log is the old one's.
    record = two.begin(incarnation=stored.incarnation, epoch=2)
    run = FakeRun(incarnation=stored.incarnation, epoch=2, written=[b"ab"])
    two.ledger.track(run, stored.call)
    after = await eventually(
        lambda: found_run(two.ledger), lambda run: run.batches == [b"ab"] and run.record is not None
    )
    assert (after.epoch, after.owner, after.owner_alive) == (2, OWNER_B, True)
    two.finish(record)


async def test_a_taker_that_dies_before_it_writes_leaves_the_log_before_its_own(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str, valkey: Valkey
) -> None:
    await begin_run(one, b"a")
    await die_and_lapse(one, redis, redis_prefix)
    assert await two.ledger.take_over(await found_run(two.ledger)) == 2
    await die_and_lapse(two, redis, redis_prefix)
    async with ledger_side(valkey.url, "c:1#cccccccc01", redis_prefix) as three:
        stored = await found_run(three.ledger)
        assert (stored.epoch, stored.batches, stored.owner_alive) == (2, [b"a"], False)
        assert await three.ledger.take_over(stored) == 3


async def test_an_owner_that_was_taken_for_dead_is_fenced(one: LedgerSide, two: LedgerSide) -> None:
    run = await begin_run(one, b"a")
    # Whether its key has lapsed is not asked again here.
    assert await two.ledger.take_over(await found_run(two.ledger)) == 2
    two.begin(incarnation=run.incarnation, epoch=2, num_output_tokens=5)
    # Its next write is the first it hears of that.
    one.ledger.save(one.records[0])
    await until(lambda: run.num_fenced == 1)
    # Whatever it still says is not written.
    one.finish(one.records[0], "error")
    await until(lambda: one.ledger._writer.unwritten("one") is None)
    record = await eventually(
        lambda: two.ledger.find("one"), lambda record: record is not None and record.epoch == 2
    )
    assert record is not None
    assert (record.owner, record.state) == (OWNER_B, "preprocessing")
    assert run.num_fenced == 1


async def test_an_earlier_incarnation_at_the_same_address_is_gone(
    one: LedgerSide, valkey: Valkey, redis_prefix: str
) -> None:
    await begin_run(one, b"a")
    async with ledger_side(valkey.url, OWNER_A.replace("01", "02"), redis_prefix) as restarted:
        assert not (await found_run(restarted.ledger)).owner_alive
    async with ledger_side(valkey.url, OWNER_A.replace("a01", "x01"), redis_prefix) as elsewhere:
        assert (await found_run(elsewhere.ledger)).owner_alive


async def test_a_request_that_was_handed_over_stays_as_it_was_for_the_next(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    run = await begin_run(one, b"a")
    run.written.append(b"b")
    record = one.records[0]
    record.num_output_tokens = 3
    one.ledger.release("one", 1)
    one.finish(record, "cancelled")
    stored = await eventually(
        lambda: found_run(two.ledger), lambda run: run.record is not None and run.record.released
    )
    assert stored.record is not None
    assert (stored.record.is_live, stored.record.num_output_tokens) == (True, 3)
    assert (stored.owner_alive, stored.ended, stored.batches) == (False, False, [b"a", b"b"])
    assert await redis.ttl(f"{redis_prefix}request:one") > 60
    assert await two.ledger.take_over(stored) == 2
    taken = await found_run(two.ledger)
    assert (taken.owner_alive, taken.owner) == (True, OWNER_B)
    assert run.num_fenced == 0


async def test_leaving_the_ledger_hands_over_and_ends_its_life(
    valkey: Valkey, redis_prefix: str, two: LedgerSide, redis: Redis
) -> None:
    async with ledger_side(valkey.url, OWNER_A, redis_prefix) as one:
        run = await begin_run(one, b"a")
        run.written.append(b"b")
        one.ledger.release("one", 1)
        one.finish(one.records[0], "cancelled")
    stored = await found_run(two.ledger)
    assert (stored.owner_alive, stored.batches) == (False, [b"a", b"b"])
    assert not await redis.exists(f"{redis_prefix}gateway:{OWNER_A}")


async def test_a_cancel_of_a_request_whose_gateway_is_gone_is_noted_by_the_canceller(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    await begin_run(one, b"a")
    await die_and_lapse(one, redis, redis_prefix)
    record = await two.ledger.find("one")
    assert record is not None
    await asyncio.gather(*(two.ledger.request_cancel(record) for _ in range(3)))
    await until(lambda: two.ledger._writer.num_unwritten == 0)
    stored = await found_run(two.ledger)
    assert stored.record is not None
    assert (stored.record.state, stored.record.finish_reason) == ("finished", "cancelled")
    assert await two.ledger.list_live() == []


async def test_a_cancel_meets_the_one_who_takes_the_request_over(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    run = await begin_run(one, b"a")
    await redis.set(f"{redis_prefix}cancel:one", run.incarnation, ex=60)
    await die_and_lapse(one, redis, redis_prefix)
    stored = await found_run(two.ledger)
    await two.ledger.take_over(stored)
    two.begin(incarnation=stored.incarnation, epoch=2)
    await until(lambda: two.cancelled == [("one", run.incarnation)])


async def test_a_take_over_whose_reply_was_lost_is_given_back(
    one: LedgerSide,
    two: LedgerSide,
    redis: Redis,
    redis_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await begin_run(one, b"a")
    await die_and_lapse(one, redis, redis_prefix)
    stored = await found_run(two.ledger)
    take_over = RunFinder.take_over

    async def lose_the_reply(*arguments: Any) -> None:
        assert await take_over(*arguments) == 2
        raise TimeoutError

    monkeypatch.setattr(RunFinder, "take_over", lose_the_reply)
    with pytest.raises(Unavailable):
        await two.ledger.take_over(stored)
    monkeypatch.undo()
    # Any gateway sees that, not only the one that knows it does not have the request.
    await eventually(lambda: redis.hget(f"{redis_prefix}request:one", "released"), b"True".__eq__)
    after = await eventually(lambda: found_run(two.ledger), lambda run: not run.owner_alive)
    assert await two.ledger.take_over(after) == after.epoch + 1
