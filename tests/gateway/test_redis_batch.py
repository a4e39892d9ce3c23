"""What the loop that the gateway runs on makes of connections that break."""

import asyncio
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis

from gateway.redis_batch import FAILURES, Batch
from tests.fakes.valkey import Valkey


def test_a_connection_that_was_reset_is_redis_away_and_the_next_one_is_there(
    valkey: Valkey,
) -> None:
    async def break_and_send() -> list[Any]:
        async with Redis(port=valkey.port, decode_responses=True) as client:
            await client.ping()
            (connection,) = client.connection_pool._available_connections
            connection._writer.transport.abort()
            batch = Batch(client)
            batch.command("ECHO", "text")
            with pytest.raises(FAILURES):
                # redis-py would look first whether there is something to read, and see the end.
                connection.can_read_destructive = no_look
                await batch.execute()
            return await batch.execute()

    async def no_look() -> bool:
        return False

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(break_and_send()) == ["text"]
