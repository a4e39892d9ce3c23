"""Requests that arrive, and streams that run, while the only replica of a service restarts."""

import asyncio

import httpx2
import pytest

from gateway.settings import Settings
from tests.fakes.engine_script import one_per_step
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.gateway_line import eventually, serving_gateway, streamed_text, until_ready
from tests.fakes.tiny_tokenizers import byte_level
from tests.fakes.valkey import Valkey

TEXT = "Hello there"
SCRIPT = one_per_step(byte_level().encode(TEXT).ids, delay_seconds=0.03)
SERVICES = ["tokenizers", "detoks", "engines"]


def gateway_settings(line: Fleet, valkey: Valkey, redis_prefix: str) -> Settings:
    addresses = {
        name.removesuffix("s"): tuple(replica.address for replica in getattr(line, name))
        for name in SERVICES
    }
    return Settings(**addresses, port=0, redis=valkey.url, redis_prefix=redis_prefix)


async def is_away(client: httpx2.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 503


@pytest.mark.parametrize("name", SERVICES)
async def test_a_restart_costs_requests_that_arrive_in_it_no_error(
    name: str, valkey: Valkey, redis_prefix: str
) -> None:
    body = {"model": "tiny", "prompt": "hi", "stream": True}
    async with fleet(SCRIPT) as line:
        (replica,) = getattr(line, name)
        async with (
            serving_gateway(gateway_settings(line, valkey, redis_prefix)) as port,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client,
        ):
            await until_ready(client)
            running = [asyncio.create_task(client.post("/v1/completions", json=body))]
            await replica.stop()
            await eventually(lambda: is_away(client), bool)
            running += [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)
            ]
            await replica.start()
            for response in await asyncio.gather(*running):
                assert response.status_code == 200, response.text
                assert "error" not in response.text
                assert streamed_text(response, 0) == TEXT
