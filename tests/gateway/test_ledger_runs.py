"""Runs in Redis: claimed, kept, followed from elsewhere, handed over, taken over, fenced."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway import run_writer
from gateway.ledger import Ledger
from gateway.ledger_keys import LedgerKeys
from gateway.redis_state import RedisState
from gateway.run_finder import RunFinder
from gateway.run_store import StoredCall, StoredRun
from gateway.run_writer import RunWriter
from protos.wire.errors import Unavailable
from tests.fakes.gateway_line import eventually
from tests.fakes.ledgers import TTL_SECONDS, FakeRun, LedgerSide, ledger_side
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

A, B = "a:1#aaaaaaaa01", "b:1#bbbbbbbb01"


@pytest.fixture
async def redis(valkey: Valkey) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey.url) as client:
        yield client


@pytest.fixture
async def one(valkey: Valkey, redis_prefix: str) -> AsyncIterator[LedgerSide]:
    async with ledger_side(valkey.url, A, redis_prefix) as side:
        await until(lambda: side.ledger.available)
        yield side


@pytest.fixture
async def two(valkey: Valkey, redis_prefix: str) -> AsyncIterator[LedgerSide]:
    async with ledger_side(valkey.url, B, redis_prefix) as side:
        await until(lambda: side.ledger.available)
        yield side


async def found(ledger: Ledger, request_id: str = "one") -> StoredRun:
    run = await ledger.find_run(request_id)
    assert run is not None
    return run


async def die(side: LedgerSide, redis: Redis, prefix: str) -> None:
    await side.die()
    await redis.delete(f"{prefix}gateway:{side.ledger.owner}")


async def begin(side: LedgerSide, *batches: bytes) -> FakeRun:
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


async def test_a_run_is_found_by_any_gateway_and_grows(one: LedgerSide, two: LedgerSide) -> None:
    run = await begin(one, b"a")
    stored = await found(two.ledger)
    assert (stored.call, stored.epoch, stored.owner) == (b"call", 1, A)
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
    run = await begin(one, b"a")
    run.written.append(b"b")
    run.ended = True
    stored = await eventually(lambda: found(two.ledger), lambda stored: stored.ended)
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


async def test_a_claim_is_had_by_one_of_many(one: LedgerSide, two: LedgerSide) -> None:
    claims = await asyncio.gather(
        *(
            side.ledger.claim("digest", f"body {number}", f"request {number}", b"call")
            for number, side in enumerate([one, two] * 8)
        )
    )
    assert sum(claim.is_new for claim in claims) == 1
    assert len({claim.incarnation for claim in claims}) == 1
    assert len({(claim.request_id, claim.body_digest) for claim in claims}) == 1


async def test_a_claim_that_was_given_up_may_be_made_again(
    one: LedgerSide, two: LedgerSide
) -> None:
    assert (await one.ledger.claim("digest", "body", "one", b"call")).is_new
    one.ledger.unclaim("digest")
    claim = await eventually(
        lambda: two.ledger.claim("digest", "body", "two", b"call"), lambda claim: claim.is_new
    )
    assert claim.request_id == "two"


async def test_a_claim_whose_run_never_began_is_taken_with_its_call(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    await one.ledger.claim("digest", "body", "one", b"call")
    await die(one, redis, redis_prefix)
    await redis.delete(f"{redis_prefix}request:one:call")
    claim = await two.ledger.claim("digest", "body", "other", b"another call")
    assert (claim.is_new, claim.request_id) == (False, "one")
    stored = await two.ledger.find_run("one", claim)
    assert stored is not None
    assert (stored.record, stored.call, stored.owner_alive) == (None, b"call", False)
    assert await two.ledger.take_over(stored) == 2


async def test_a_claim_whose_reply_was_lost_is_not_waited_for(
    one: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    claim = await one.ledger.claim("digest", "body", "one", b"call")
    # As if it had been made after this gateway had given up the wait for it.
    one.ledger._runs.forget(claim.incarnation)
    again = await one.ledger.claim("digest", "body", "two", b"call")
    assert (again.is_new, again.request_id) == (True, "two")


async def test_a_claim_of_a_finished_run_stays(one: LedgerSide, two: LedgerSide) -> None:
    claim = await one.ledger.claim("digest", "body", "one", b"call")
    record = one.begin(incarnation=claim.incarnation)
    run = FakeRun(incarnation=claim.incarnation, written=[b"a"], ended=True)
    one.ledger.track(run, b"call")
    one.finish(record)
    await until(lambda: one.ledger._runs.find(claim.incarnation) is None)
    for side in (one, two):
        again = await side.ledger.claim("digest", "body", "two", b"call")
        assert (again.is_new, again.request_id) == (False, "one")
        stored = await side.ledger.find_run("one", again)
        assert stored is not None
        assert stored.ended


async def test_a_claim_stays_when_another_request_uses_the_id_again(
    one: LedgerSide, two: LedgerSide
) -> None:
    claim = await one.ledger.claim("digest", "body", "one", b"call")
    record = one.begin(incarnation=claim.incarnation)
    one.ledger.track(FakeRun(incarnation=claim.incarnation, written=[b"a"], ended=True), b"call")
    one.finish(record)
    await until(lambda: one.ledger._runs.find(claim.incarnation) is None)
    two.begin(incarnation="other")
    await eventually(
        lambda: one.ledger.find("one"),
        lambda found: found is not None and found.incarnation == "other",
    )
    for side in (one, two):
        again = await side.ledger.claim("digest", "body", "two", b"call")
        assert (again.is_new, again.incarnation) == (False, claim.incarnation)
        stored = await side.ledger.find_run("one", again)
        assert stored is not None
        assert (stored.batches, stored.ended) == ([b"a"], True)


async def test_a_run_whose_owner_is_gone_is_taken_by_one_and_written_on(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    await begin(one, b"a", b"b")
    await die(one, redis, redis_prefix)
    stored = await found(two.ledger)
    assert not stored.owner_alive
    assert stored.batches == [b"a", b"b"]
    epochs = await asyncio.gather(*(two.ledger.take_over(stored) for _ in range(4)))
    assert sorted(epochs, key=str) == [2, None, None, None]
    # Until the new owner has written anything, the log is the old one's.
    record = two.begin(incarnation=stored.incarnation, epoch=2)
    run = FakeRun(incarnation=stored.incarnation, epoch=2, written=[b"ab"])
    two.ledger.track(run, stored.call)
    after = await eventually(
        lambda: found(two.ledger), lambda run: run.batches == [b"ab"] and run.record is not None
    )
    assert (after.epoch, after.owner, after.owner_alive) == (2, B, True)
    two.finish(record)


async def test_a_taker_that_dies_before_it_writes_leaves_the_log_before_its_own(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str, valkey: Valkey
) -> None:
    await begin(one, b"a")
    await die(one, redis, redis_prefix)
    assert await two.ledger.take_over(await found(two.ledger)) == 2
    await die(two, redis, redis_prefix)
    async with ledger_side(valkey.url, "c:1#cccccccc01", redis_prefix) as three:
        stored = await found(three.ledger)
        assert (stored.epoch, stored.batches, stored.owner_alive) == (2, [b"a"], False)
        assert await three.ledger.take_over(stored) == 3


async def test_an_owner_that_was_taken_for_dead_is_fenced(one: LedgerSide, two: LedgerSide) -> None:
    run = await begin(one, b"a")
    # Whether its key has lapsed is not asked again here.
    assert await two.ledger.take_over(await found(two.ledger)) == 2
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
    assert (record.owner, record.state) == (B, "preprocessing")
    assert run.num_fenced == 1


async def test_an_earlier_incarnation_at_the_same_address_is_gone(
    one: LedgerSide, valkey: Valkey, redis_prefix: str
) -> None:
    await begin(one, b"a")
    async with ledger_side(valkey.url, A.replace("01", "02"), redis_prefix) as restarted:
        assert not (await found(restarted.ledger)).owner_alive
    async with ledger_side(valkey.url, A.replace("a01", "x01"), redis_prefix) as elsewhere:
        assert (await found(elsewhere.ledger)).owner_alive


async def test_a_request_that_was_handed_over_stays_as_it_was_for_the_next(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    run = await begin(one, b"a")
    run.written.append(b"b")
    record = one.records[0]
    record.num_output_tokens = 3
    one.ledger.release("one", 1)
    one.finish(record, "cancelled")
    stored = await eventually(
        lambda: found(two.ledger), lambda run: run.record is not None and run.record.released
    )
    assert stored.record is not None
    assert (stored.record.is_live, stored.record.num_output_tokens) == (True, 3)
    assert (stored.owner_alive, stored.ended, stored.batches) == (False, False, [b"a", b"b"])
    assert await redis.ttl(f"{redis_prefix}request:one") > 60
    assert await two.ledger.take_over(stored) == 2
    taken = await found(two.ledger)
    assert (taken.owner_alive, taken.owner) == (True, B)
    assert run.num_fenced == 0


async def test_leaving_the_ledger_hands_over_and_ends_its_life(
    valkey: Valkey, redis_prefix: str, two: LedgerSide, redis: Redis
) -> None:
    async with ledger_side(valkey.url, A, redis_prefix) as one:
        run = await begin(one, b"a")
        run.written.append(b"b")
        one.ledger.release("one", 1)
        one.finish(one.records[0], "cancelled")
    stored = await found(two.ledger)
    assert (stored.owner_alive, stored.batches) == (False, [b"a", b"b"])
    assert not await redis.exists(f"{redis_prefix}gateway:{A}")


async def test_a_cancel_of_a_request_whose_gateway_is_gone_is_noted_by_the_canceller(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    await begin(one, b"a")
    await die(one, redis, redis_prefix)
    record = await two.ledger.find("one")
    assert record is not None
    await asyncio.gather(*(two.ledger.request_cancel(record) for _ in range(3)))
    await until(lambda: two.ledger._writer.num_unwritten == 0)
    stored = await found(two.ledger)
    assert stored.record is not None
    assert (stored.record.state, stored.record.finish_reason) == ("finished", "cancelled")
    assert await two.ledger.list_live() == []


async def test_a_cancel_meets_the_one_who_takes_the_request_over(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    run = await begin(one, b"a")
    await redis.set(f"{redis_prefix}cancel:one", run.incarnation, ex=60)
    await die(one, redis, redis_prefix)
    stored = await found(two.ledger)
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
    await begin(one, b"a")
    await die(one, redis, redis_prefix)
    stored = await found(two.ledger)
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
    after = await eventually(lambda: found(two.ledger), lambda run: not run.owner_alive)
    assert await two.ledger.take_over(after) == after.epoch + 1


async def test_two_requests_of_one_id_do_not_mix(
    one: LedgerSide, two: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    first = await begin(one, b"a")
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
    run = await begin(one, *batches)
    run.ended = True
    stored = await eventually(lambda: found(one.ledger), lambda stored: stored.ended)
    assert stored.batches == batches


async def test_a_log_that_redis_has_lost_is_written_again_while_it_grows(
    one: LedgerSide, redis: Redis, redis_prefix: str
) -> None:
    run = await begin(one, b"a", b"b")
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
    run = await begin(one, b"a", b"b")
    kept = one.ledger._runs.find(run.incarnation)
    assert kept is not None
    kept._num_written = 1
    run.written.append(b"c")
    stored = await eventually(lambda: found(one.ledger), lambda run: len(run.batches) >= 3)
    assert stored.batches == [b"a", b"b", b"c"]


async def test_a_log_that_cannot_be_read_holds_up_no_other(
    one: LedgerSide, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeRun):
        def batches(self, start: int) -> list[bytes]:
            raise ValueError("broken")

    one.ledger.track(Broken("broken", "inc-broken"), b"call")
    await begin(one, b"a")
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
    await die(one, redis, redis_prefix)
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
