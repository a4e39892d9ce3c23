"""The record of a request in Redis: its stages, its time to live, and Redis away."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway import ledger_writer, redis_client
from gateway.ledger import Ledger
from gateway.records import RequestRecord, Stage
from protos.common.v1 import common_pb2
from tests.fakes.gateway_line import (
    MODEL,
    GatewayLine,
    eventually,
    gateway_line,
    streamed_text,
    whole_text,
)
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey

STOP = common_pb2.FINISH_REASON_STOP
SILENT = DetokScript([])


@pytest.fixture
async def redis(valkey: Valkey) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey.url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def own_line(own_valkey: Valkey) -> AsyncIterator[GatewayLine]:
    """A line whose Valkey no other test uses."""
    async with gateway_line(own_valkey.url) as running:
        await until_redis(running, "connected")
        yield running


async def until_redis(line: GatewayLine, condition: str) -> None:
    async def ask() -> Any:
        return (await line.client.get("/readyz")).json()["redis"]

    await eventually(ask, lambda answer: answer == condition)


async def test_a_request_passes_its_stages_in_order(line: GatewayLine) -> None:
    gates = {number: asyncio.Event() for number in range(3)}
    line.detok.script = DetokScript(
        [output(num_tokens=0, started=True, num_cached_tokens=1), output("a"), output(finish=STOP)],
        gates,
    )
    line.tokenizer.gate.clear()
    line.client.headers["x-request-id"] = "staged"
    task = asyncio.create_task(line.chat(seed=5))
    found = []
    openers = [
        ("preprocessing", line.tokenizer.gate),
        ("waiting", gates[0]),
        ("prefilling", gates[1]),
        ("decoding", gates[2]),
    ]
    await eventually(
        lambda: line.client.get("/v1/requests/staged"), lambda answer: answer.status_code == 200
    )
    for state, gate in openers:
        found.append(await line.record_when("staged", lambda r, s=state: r["state"] == s))  # type: ignore[misc]
        gate.set()
    await task
    record = await line.record("staged")
    assert record["state"] == "finished"
    times = record["stage_times"]
    stages = ["preprocessing", "waiting", "prefilling", "decoding", "finished"]
    assert list(times) == stages
    assert sorted(times.values()) == list(times.values())
    assert [list(one["stage_times"]) for one in found] == [
        stages[: number + 1] for number in range(4)
    ]
    assert record["created"] == times["preprocessing"]
    expected = {
        "id": "staged",
        "object": "request",
        "finish_reason": "stop",
        "error": None,
        "endpoint": "/v1/chat/completions",
        "model": MODEL,
        "num_choices": 1,
        "num_prompt_tokens": 2,
        "num_cached_tokens": 1,
        "num_output_tokens": 2,
        "seed": 5,
        "engine": line.settings.engine[0],
        "detok": line.settings.detok[0],
    }
    assert {name: record[name] for name in expected} == expected


async def test_records_are_found_by_either_form_of_the_id(line: GatewayLine) -> None:
    chat, text = await line.chat(), await line.complete()
    for response in (chat, text):
        for request_id in (response.json()["id"], response.headers["x-request-id"]):
            record = await line.record(request_id)
            assert record["id"] == response.headers["x-request-id"]


async def test_every_key_has_a_time_to_live(line: GatewayLine, redis: Redis) -> None:
    line.detok.script = SILENT
    prefix = line.settings.redis_prefix
    line.client.headers["x-request-id"] = "live"
    task = asyncio.create_task(line.chat())
    await eventually(lambda: redis.zcard(f"{prefix}requests"), lambda count: count == 1)
    assert 0 < await redis.ttl(f"{prefix}request:live") <= 60
    await line.client.delete("/v1/requests/live")
    await line.client.delete("/v1/requests/nothing")
    await task
    await eventually(
        lambda: redis.hget(f"{prefix}request:live", "state"), lambda state: state == "finished"
    )
    assert 60 < await redis.ttl(f"{prefix}request:live") <= line.settings.record_ttl_seconds
    keys = [key async for key in redis.scan_iter(f"{prefix}*")]
    assert keys
    for key in keys:
        assert await redis.ttl(key) > 0
    assert await redis.zcard(f"{prefix}requests") == 0


async def test_a_new_request_of_an_old_id_keeps_nothing_of_it(line: GatewayLine) -> None:
    line.client.headers["x-request-id"] = "same"
    await line.chat(max_tokens=100_000)
    assert (await line.record("same"))["error"]["code"] == "context_length_exceeded"
    await line.chat()
    record = await line.record_when("same", lambda record: record["finish_reason"] == "stop")
    assert record["error"] is None


async def test_redis_killed_and_restarted_empty(own_line: GatewayLine, own_valkey: Valkey) -> None:
    """Streams go on, what needs Redis answers 503, and live records are written again."""
    line, gate = own_line, asyncio.Event()
    line.detok.script = pieces("a", "b", gates={1: gate})
    line.client.headers["x-request-id"] = "through"
    task = asyncio.create_task(line.complete(stream=True))
    await eventually(
        lambda: line.client.get("/v1/requests"), lambda answer: bool(answer.json()["data"])
    )
    own_valkey.kill()
    line.client.headers["x-request-id"] = "meanwhile"
    line.detok.script = pieces("fine")
    assert whole_text(await line.chat()) == "fine"
    await until_redis(line, "away")
    for method, path in (
        ("GET", "/v1/requests"),
        ("GET", "/v1/requests/elsewhere"),
        ("DELETE", "/v1/requests/elsewhere"),
    ):
        answer = await line.client.request(method, path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "ledger_unavailable"
        assert answer.headers["retry-after"]
    assert (await line.record("through"))["state"] in ("prefilling", "decoding")
    assert (await line.client.get("/readyz")).status_code == 200

    own_valkey.start()
    await until_redis(line, "connected")
    async with Redis.from_url(own_valkey.url, decode_responses=True) as redis:
        prefix = line.settings.redis_prefix
        states = {"through": "decoding", "meanwhile": "finished"}
        for request_id, state in states.items():
            key = f"{prefix}request:{request_id}"
            await eventually(
                lambda key=key: redis.hget(key, "state"),  # type: ignore[misc]
                lambda found, state=state: found == state,  # type: ignore[misc]
            )
    gate.set()
    assert streamed_text(await task) == "ab"


async def test_cancel_works_again_after_a_restart(
    own_line: GatewayLine, own_valkey: Valkey
) -> None:
    own_valkey.kill()
    await own_line.chat()
    await until_redis(own_line, "away")
    own_valkey.start()
    await until_redis(own_line, "connected")
    own_line.detok.script = SILENT
    own_line.client.headers["x-request-id"] = "late"
    task = asyncio.create_task(own_line.chat())
    async with Redis.from_url(own_valkey.url, decode_responses=True) as redis:
        prefix = own_line.settings.redis_prefix
        key = f"{prefix}request:late"
        incarnation = await eventually(lambda: redis.hget(key, "incarnation"), bool)
        await eventually(
            lambda: redis.publish(f"{prefix}cancel", f"{incarnation} late"), lambda heard: heard > 0
        )
    assert (await task).json()["choices"][0]["finish_reason"] == "cancelled"


async def test_a_hung_redis_holds_up_no_request(
    own_valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever waits for Redis waits for longer than the test's client does.
    monkeypatch.setattr(redis_client, "TIMEOUT_SECONDS", 300.0)
    async with gateway_line(own_valkey.url) as line:
        await until_redis(line, "connected")
        with own_valkey.hanging():
            for stream in (False, True):
                assert (await line.chat(stream=stream)).status_code == 200


async def test_a_hung_redis_is_found_out(
    own_valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "TIMEOUT_SECONDS", 0.1)
    async with gateway_line(own_valkey.url) as line:
        await until_redis(line, "connected")
        with own_valkey.hanging():
            assert (await line.client.get("/v1/requests")).status_code == 503
            await line.chat()
            await until_redis(line, "away")
        await until_redis(line, "connected")


async def test_what_is_left_is_written_at_the_end(valkey: Valkey, redis: Redis) -> None:
    async with gateway_line(valkey.url, redis_prefix="flush:") as line:
        line.client.headers["x-request-id"] = "last"
        await line.chat()
    assert await redis.hget("flush:request:last", "state") == "finished"


async def test_finished_records_are_given_up_before_live_ones_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_writer, "_MAX_UNWRITTEN", 2)
    ledger = Ledger(Redis(port=1), "x:", 60, tuple, lambda *_: None, "here:1#2")

    def record(request_id: str, state: Stage) -> RequestRecord:
        return RequestRecord(
            id=request_id, incarnation=request_id, owner="", endpoint="", model="", seed=0,
            num_choices=1, state=state,
        )  # fmt: skip

    ledger.save(record("live", Stage.DECODING))
    ledger.save(record("old", Stage.FINISHED))
    ledger.save(record("new", Stage.FINISHED))
    assert ledger.num_dropped == 1
    assert await ledger.find("live")
    assert await ledger.find("new")
