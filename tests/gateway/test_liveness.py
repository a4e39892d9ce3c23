"""The names of gateways' incarnations, and the key that says which of them lives."""

import asyncio

from redis.asyncio import Redis

from gateway.liveness import is_earlier_incarnation, make_owner
from tests.fakes.gateway_line import eventually
from tests.fakes.ledgers import ledger_side
from tests.fakes.valkey import Valkey


def test_only_who_listened_at_the_same_place_is_an_earlier_incarnation() -> None:
    owner = make_owner("127.0.0.1", 8000)
    assert not is_earlier_incarnation(owner, owner)
    assert is_earlier_incarnation(make_owner("127.0.0.1", 8000), owner)
    for other in (make_owner("127.0.0.1", 8001), make_owner("127.0.0.2", 8000)):
        assert not is_earlier_incarnation(other, owner)
    # A container of the same name and port, on another machine or in another network.
    address, _, random = owner.partition("#")
    elsewhere = f"{address}#{'0' * 8}{random[8:]}"
    assert not is_earlier_incarnation(elsewhere, owner)


def test_an_owner_says_its_port() -> None:
    assert make_owner("::1", 8123).partition("#")[0].endswith(":8123")


async def test_the_key_lapses_soon_after_its_gateway(valkey: Valkey, redis_prefix: str) -> None:
    async with (
        Redis.from_url(valkey.url) as redis,
        ledger_side(valkey.url, "a:1#aaaaaaaa01", redis_prefix) as side,
    ):
        key = f"{redis_prefix}gateway:a:1#aaaaaaaa01"
        await eventually(lambda: redis.exists(key), bool)
        assert 0 < await redis.pttl(key) <= 1500
        await side.die()
        await eventually(lambda: redis.exists(key), lambda exists: not exists)


async def test_the_key_is_renewed_while_a_batch_is_stuck(valkey: Valkey, redis_prefix: str) -> None:
    async with (
        Redis.from_url(valkey.url) as redis,
        ledger_side(valkey.url, "a:1#aaaaaaaa01", redis_prefix) as side,
    ):
        stuck = asyncio.Event()

        async def write() -> bool:
            await stuck.wait()
            return False

        side.ledger._runs.write = write  # type: ignore[method-assign]
        key = f"{redis_prefix}gateway:a:1#aaaaaaaa01"
        await eventually(lambda: redis.exists(key), bool)
        for _ in range(2):
            # Made shorter by us, it is long again only when it was renewed.
            await redis.pexpire(key, 1000)
            await eventually(lambda: redis.pttl(key), lambda left: left > 1000)
        stuck.set()
