"""Claims of idempotency keys in Redis: had by one, given up, taken with their call, kept."""

import asyncio

from redis.asyncio import Redis

from tests.fakes.gateway_line import eventually
from tests.fakes.ledgers import FakeRun, LedgerSide, die_and_lapse
from tests.fakes.waiting import until


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
    await die_and_lapse(one, redis, redis_prefix)
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
