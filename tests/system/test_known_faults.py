"""Faults that only real processes and real sockets can show."""

import asyncio
import random
from typing import Any

import grpc
import httpx
import pytest
import redis.asyncio as redis

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.fakes.running_line import RunningLine
from tests.fakes.streaming_client import finish_reason_of, open_stream, text_of
from tests.fakes.waiting import until_true

pytestmark = pytest.mark.slow

NUM_DISCONNECTS = 300
# With those whose end the engine has not told yet, no more than may run and wait: 16, 2 and 10.
CONCURRENCY = 12
# Far more than any of the streams is read; the most that the model has room for.
MAX_TOKENS = 8000
STORY = {
    "messages": [{"role": "user", "content": "Tell me a very long story about the sea."}],
    "max_tokens": MAX_TOKENS,
    "temperature": 1.0,
}
REFERENCE = {
    "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
    "max_tokens": 24,
    "temperature": 0,
}
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
TIMEOUT = httpx.Timeout(60.0)


async def model_of(client: httpx.AsyncClient, url: str) -> str:
    return str((await client.get(f"{url}/v1/models")).json()["data"][0]["id"])


async def engine_load(address: str) -> common_pb2.EngineLoad:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        return (await stub.GetStatus(engine_pb2.GetStatusRequest())).load


async def engine_metrics(client: httpx.AsyncClient, url: str) -> tuple[float, float]:
    """Running and waiting requests, as the gateway's /metrics has them."""
    text = (await client.get(f"{url}/metrics")).text
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in ("tokenline_engine_running_requests", "tokenline_engine_waiting_requests"):
            values[name] = float(rest.rpartition(" ")[2])
    return values["tokenline_engine_running_requests"], values["tokenline_engine_waiting_requests"]


async def answer_text(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    answer = await client.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def leave_early(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], request_id: str, num_events: int
) -> None:
    async with open_stream(client, url, body, request_id) as events:
        for _ in range(num_events):
            await anext(events)


async def test_bug_63_three_hundred_disconnects_leave_nothing_running(line: RunningLine) -> None:
    url, engine = line.url, line.service("engine_svc").address
    draw = random.Random(63)
    slots = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(limits=LIMITS, timeout=TIMEOUT) as client:
        model = await model_of(client, url)
        reference = await answer_text(client, url, {"model": model, **REFERENCE})
        await until_true(lambda: _is_idle(engine))
        free_before = (await engine_load(engine)).num_free_blocks

        async def visit(index: int, num_events: int) -> None:
            async with slots:
                body = {"model": model, "seed": index, **STORY}
                await leave_early(client, url, body, f"bug-63-{index}", num_events)

        visits = [visit(i, draw.randrange(4)) for i in range(NUM_DISCONNECTS)]
        await asyncio.gather(*visits)

        await until_true(lambda: _is_idle(engine), seconds=1.0)
        load = await engine_load(engine)
        assert load.num_free_blocks == free_before == load.num_blocks

        async def gateway_sees_none() -> bool:
            return await engine_metrics(client, url) == (0.0, 0.0)

        await until_true(gateway_sees_none, seconds=1.0)
        # Nothing is computed for those who left.
        assert (await engine_load(engine)).num_steps <= load.num_steps + 1
        await _check_records(client, url, line.redis_url)
        assert await answer_text(client, url, {"model": model, **REFERENCE}) == reference


async def _is_idle(engine: str) -> bool:
    load = await engine_load(engine)
    return load.num_running == load.num_waiting == 0


async def _check_records(client: httpx.AsyncClient, url: str, redis_url: str) -> None:
    """Every request is told as cancelled, by the API and in Redis."""
    async with redis.Redis.from_url(redis_url, decode_responses=True) as database:

        async def all_are_written() -> bool:
            states = [
                await database.hget(f"tokenline:request:bug-63-{i}", "state")
                for i in range(NUM_DISCONNECTS)
            ]
            return all(state == "finished" for state in states)

        await until_true(all_are_written)
        for i in range(NUM_DISCONNECTS):
            key = f"tokenline:request:bug-63-{i}"
            assert await database.hget(key, "finish_reason") == "cancelled"
            assert await database.ttl(key) > 0
    record = (await client.get(f"{url}/v1/requests/bug-63-0")).json()
    assert (record["state"], record["finish_reason"]) == ("finished", "cancelled")


async def test_a_request_is_cancelled_by_id_through_another_gateway(line: RunningLine) -> None:
    first, second = line.state.gateway_urls
    async with httpx.AsyncClient(limits=LIMITS, timeout=TIMEOUT) as client:
        body = {"model": await model_of(client, first), "seed": 1, **STORY}
        async with open_stream(client, first, body, "cancel-me") as events:
            seen = [await anext(events), await anext(events)]

            async def second_knows() -> bool:
                answer = await client.get(f"{second}/v1/requests/cancel-me")
                return answer.status_code == 200 and answer.json()["state"] == "decoding"

            await until_true(second_knows)
            answer = await client.delete(f"{second}/v1/requests/cancel-me")
            assert answer.status_code == 200, answer.text
            seen += [event async for event in events]
        assert finish_reason_of(seen) == "cancelled"
        assert text_of(seen)
        await until_true(lambda: _is_idle(line.service("engine_svc").address))


async def test_bug_45_a_bias_outside_the_vocabulary_is_refused_and_hurts_nobody(
    line: RunningLine,
) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        body = {"model": await model_of(client, line.url), **REFERENCE}
        reference = await answer_text(client, line.url, body)
        # SmolLM2's head has 49152 rows.
        bad: list[Any] = [{"49152": 5}, {"-1": 5}, {"abc": 5}, {"5": 101}, {"5": "x"}]
        for biases in bad:
            answer = await client.post(
                f"{line.url}/v1/chat/completions", json={**body, "logit_bias": biases}
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "logit_bias"
            assert await answer_text(client, line.url, body) == reference
        for biases in ({}, {"49151": -100}):
            biased = {**body, "logit_bias": biases}
            assert await answer_text(client, line.url, biased) == reference
            assert await answer_text(client, line.url, body) == reference
