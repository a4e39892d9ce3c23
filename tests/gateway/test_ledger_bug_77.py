"""BUG-77: after a cancelled wait for Redis, the next one must not read the reply of the last."""

import asyncio
import random

import pytest
from redis.asyncio import BlockingConnectionPool, Redis

from gateway import redis_client
from gateway.redis_batch import Batch
from tests.fakes.delaying_relay import delaying_relay
from tests.fakes.gateway_line import GatewayLine, gateway_line
from tests.fakes.ledgers import make_record
from tests.fakes.valkey import Valkey

DELAY_SECONDS = 0.05
# 200 rounds in all, side by side to save time.
SIDES = 20
ROUNDS = 10


@pytest.mark.parametrize("with_batches", [False, True])
async def test_bug_77_a_cancelled_get_leaves_no_reply_for_the_next(
    valkey: Valkey, with_batches: bool
) -> None:
    """A pool of one connection; each round cancels a read of A at a random time, then reads B."""
    async with Redis.from_url(valkey.url) as plain:
        await plain.mset({"bug77:A": "of A", "bug77:B": "of B"})

    async def get(client: Redis, key: str) -> str:
        if not with_batches:
            return str(await client.get(key))
        batch = Batch(client)
        batch.command("GET", key)
        batch.command("GET", key)
        first, second = await batch.execute()
        assert first == second
        return str(first)

    async def read(port: int, chance: random.Random) -> None:
        pool = BlockingConnectionPool(
            host="127.0.0.1", port=port, max_connections=1, timeout=10, **redis_client._options()
        )
        async with Redis(connection_pool=pool) as client:
            for _ in range(ROUNDS):
                wait = asyncio.create_task(get(client, "bug77:A"))
                await asyncio.sleep(chance.uniform(0.0, 1.6 * DELAY_SECONDS))
                wait.cancel()
                first, second = await asyncio.gather(
                    wait, get(client, "bug77:B"), return_exceptions=True
                )
                assert isinstance(first, asyncio.CancelledError) or first == "of A"
                assert second == "of B"
        await pool.aclose()

    async with delaying_relay(valkey.port, DELAY_SECONDS) as port:
        await asyncio.gather(*(read(port, random.Random(side)) for side in range(SIDES)))


async def test_bug_77_a_client_that_leaves_spoils_no_others_answer(
    valkey: Valkey, redis_prefix: str
) -> None:
    """Through HTTP: lookups of A are left at random times, those of B come right after."""
    async with Redis.from_url(valkey.url) as plain:
        for request_id, seed in (("A", 1), ("B", 2)):
            record = make_record(request_id, "elsewhere:1#x", seed=seed)
            fields = [part for field in record.to_hash().items() for part in field]
            await plain.hset(f"{redis_prefix}request:{request_id}", items=list(fields))
            await plain.expire(f"{redis_prefix}request:{request_id}", 600)
    async with (
        delaying_relay(valkey.port, DELAY_SECONDS) as port,
        gateway_line(f"redis://127.0.0.1:{port}/0", redis_prefix=redis_prefix) as line,
    ):
        found = await asyncio.gather(*(look_up(line, random.Random(side)) for side in range(SIDES)))
        assert sum(found) > 0


async def look_up(line: GatewayLine, chance: random.Random) -> int:
    """How often B was answered; anything else than B's record or a clean error fails."""
    num_found = 0
    for _ in range(ROUNDS):
        wait = asyncio.create_task(line.client.get("/v1/requests/A"))
        await asyncio.sleep(chance.uniform(0.0, 1.2 * DELAY_SECONDS))
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        answer = await line.client.get("/v1/requests/B")
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "ledger_unavailable"
            continue
        assert answer.status_code == 200, answer.text
        assert (answer.json()["id"], answer.json()["seed"]) == ("B", 2)
        num_found += 1
    return num_found
