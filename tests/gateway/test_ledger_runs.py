"""Runs and their logs in Redis: kept, read from elsewhere, of bounded life and size."""

import asyncio

import pytest
from redis.asyncio import Redis

from gateway import run_writer
from gateway.ledger_keys import LedgerKeys
from gateway.redis_state import RedisState
from gateway.run_store import StoredCall
from gateway.run_writer import RunWriter
from tests.fakes.gateway_line import eventually
from tests.fakes.ledgers import (
    OWNER_A,
    TTL_SECONDS,
    FakeRun,
    LedgerSide,
    begin_run,
    die_and_lapse,
    found_run,
)
from tests.fakes.waiting import until


async def test_a_run_is_found_by_any_gateway_and_grows(one: LedgerSide, two: LedgerSide) -> None:
    run = await begin_run(one, b"a")
    stored = await found_run(two.ledger)
    assert (stored.call, stored.epoch, stored.owner) == (b"call", 1, OWNER_A)
    assert (stored.owner_alive, stored.ended) == (True, False)
    run.written += [b"\xff\x00", b"c"]
    for start in (1, 2, 3):
        await eventually(
            lambda start=start: two.ledger.read_batches("one", run.incarnation, 1, start),  # type: ignore[misc]
            lambda batches, start=start: batches == run.written[start:],  # type: ignore[misc]
        )


async def test_the_end_of_a_log_is_known_and_not_one_of_its_batches(
    one: LedgerSide, two: LedgerSide
) -> None:
    run = await begin_run(one, b"a")
    run.written.append(b"b")
    run.ended = True
    stored = await eventually(lambda: found_run(two.ledger), lambda stored: stored.ended)
    assert stored.batches == [b"a", b"b"]
    assert await two.ledger.read_batches("one", run.incarnation, 1, 1) == [b"b"]
    await until(lambda: one.ledger._runs.find(run.incarnation) is None)


async def test_no_run_is_found_where_there_is_none(one: LedgerSide) -> None:
    assert await one.ledger.find_run("none") is None
    assert await one.ledger.read_batches("none", "x", 1, 0) == []


@pytest.mark.parametrize("keyed", [False, True])
async def test_times_to_live_of_live_and_finished_runs(
    one: LedgerSide, redis: Redis, redis_prefix: str, keyed: bool
) -> None:
    incarnation = "inc-one"
    if keyed:
        incarnation = (await one.ledger.claim("digest", "body", "one", b"call")).incarnation
        assert 0 < await redis.ttl(f"{redis_prefix}idempotency:digest") <= 60
    record = one.begin(incarnation=incarnation)
    run = FakeRun(incarnation=incarnation, written=[b"a"])
    one.ledger.track(run, b"call")
    log = f"{redis_prefix}request:one:tokens:{incarnation}:1"
    call = f"{redis_prefix}request:one:call"
    await eventually(lambda: redis.llen(log), lambda length: length == 1)
    assert 50 < await redis.ttl(log) <= 60
    assert 50 < await redis.ttl(call) <= 60
    run.ended = True
    one.finish(record)
    await until(lambda: one.ledger._runs.find(incarnation) is None)
    expected = TTL_SECONDS if keyed else 60
    names = [log, call, *([f"{redis_prefix}idempotency:digest"] if keyed else [])]
    for name in names:
        assert expected - 10 < await redis.ttl(name) <= expected
    assert await redis.lrange(log, 0, -1) == [b"a", b""]


async def test_two_requests_of_one_id_do_not_mix(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    first = await begin_run(one, b"a")
    two.begin(incarnation="other")
    second = FakeRun(incarnation="other", written=[b"x"])
    two.ledger.track(second, b"other call")
    await eventually(
        lambda: two.ledger.read_batches("one", "other", 1, 0), lambda batches: batches == [b"x"]
    )
    assert await two.ledger.read_batches("one", first.incarnation, 1, 0) == [b"a"]
    assert (first.num_fenced, second.num_fenced) == (0, 0)
    stored = await two.ledger.find_run("one")
    if stored is not None:
        assert (stored.call, stored.batches) in ((b"call", [b"a"]), (b"other call", [b"x"]))


async def test_a_long_log_goes_out_in_pieces(one: LedgerSide) -> None:
    batches = [b"%d" % number for number in range(2500)] + [b"x" * (1 << 20)] * 3
    run = await begin_run(one, *batches)
    run.ended = True
    stored = await eventually(lambda: found_run(one.ledger), lambda stored: stored.ended)
    assert stored.batches == batches


async def test_a_log_that_redis_has_lost_is_written_again_while_it_grows(
    one: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    run = await begin_run(one, b"a", b"b")
    for name in ("tokens:inc-one:1", "call"):
        await redis.delete(f"{redis_prefix}request:one:{name}")
    await redis.delete(f"{redis_prefix}request:one")
    run.written.append(b"c")
    stored = await eventually(
        lambda: one.ledger.find_run("one"),
        lambda run: run is not None and len(run.batches) == 3 and run.record is not None,
    )
    assert stored is not None
    assert (stored.batches, stored.call) == ([b"a", b"b", b"c"], b"call")


async def test_what_was_written_without_a_reply_is_not_written_twice(one: LedgerSide) -> None:
    run = await begin_run(one, b"a", b"b")
    kept = one.ledger._runs.find(run.incarnation)
    assert kept is not None
    kept._num_written = 1
    run.written.append(b"c")
    stored = await eventually(lambda: found_run(one.ledger), lambda run: len(run.batches) >= 3)
    assert stored.batches == [b"a", b"b", b"c"]


async def test_a_log_that_cannot_be_read_holds_up_no_other(
    one: LedgerSide, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeRun):
        def batches(self, start: int) -> list[bytes]:
            raise ValueError("broken")

    one.ledger.track(Broken("broken", "inc-broken"), b"call")
    await begin_run(one, b"a")
    assert one.ledger._runs.find("inc-broken") is None
    assert "broken" in caplog.text


def test_ended_runs_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "_MAX_ENDED", 3)
    writer = RunWriter(Redis(port=1), LedgerKeys("x:"), 60, RedisState(), lambda: None)
    live = FakeRun("live", "live")
    for run in (live, *(FakeRun(f"{n}", f"{n}", ended=True) for n in range(10))):
        writer.track(run, StoredCall(run.request_id, run.incarnation, "", "", "", b""))
    assert writer.num_dropped == 7
    assert writer.find("live")
    assert not writer.find("6")
    assert writer.find("7")


async def test_a_writer_of_nothing_sleeps_until_a_run_begins(
    one: LedgerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = one.ledger._runs
    num_rounds = 0
    write = writer.write

    async def counted() -> bool:
        nonlocal num_rounds
        num_rounds += 1
        return await write()

    monkeypatch.setattr(writer, "write", counted)
    monkeypatch.setattr(run_writer, "_INTERVAL_SECONDS", 0.01)
    await asyncio.sleep(0.5)
    num_idle = num_rounds
    await asyncio.sleep(0.5)
    assert num_rounds == num_idle
    run = await begin_run(one, b"a")
    run.ended = True
    await eventually(lambda: found_run(one.ledger), lambda stored: stored.ended)
    assert num_rounds > num_idle


async def test_no_key_is_without_a_time_to_live(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    """After requests of every kind, in the middle and at the end."""
    runs = []
    for number in range(12):
        request_id = f"r{number}"
        claim = await one.ledger.claim(f"d{number}", "body", request_id, b"call")
        incarnation = claim.incarnation if number % 2 else f"inc-{number}"
        record = one.begin(request_id, incarnation=incarnation)
        run = FakeRun(request_id, incarnation, written=[b"a"] * number)
        one.ledger.track(run, b"call")
        runs.append((record, run))
        if number % 2 == 0:
            one.ledger.unclaim(f"d{number}")
    await one.ledger.request_cancel_soon(["nobody"], "")
    await one.ledger.request_cancel(runs[0][0])
    for number, (record, run) in enumerate(runs):
        if number % 3 == 0:
            one.ledger.release(record.id, 1)
        elif number % 3 == 1:
            run.ended = True
            one.finish(record)
        await all_lapse(redis, redis_prefix)
    await die_and_lapse(one, redis, redis_prefix)
    for request_id in ("r0", "r3", "r5"):
        stored = await two.ledger.find_run(request_id)
        if stored is not None and not stored.owner_alive:
            await two.ledger.take_over(stored)
    assert len(await all_lapse(redis, redis_prefix)) > 10


async def all_lapse(redis: Redis, prefix: str) -> list[bytes]:
    keys = [key async for key in redis.scan_iter(f"{prefix}*")]
    for key in keys:
        # -2: it is gone by now.
        assert await redis.ttl(key) not in (-1,), key
    return keys
