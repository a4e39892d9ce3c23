"""DELETE /v1/requests/{id}: in every state, from any gateway, whatever was missed meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx2
import pytest
from redis.asyncio import Redis

from gateway.new_api_key import entry
from tests.fakes.gateway_line import (
    MODEL,
    GatewayLine,
    chunks_of,
    eventually,
    gateway_line,
    is_finished,
    serving_gateway,
    streamed_text,
    until_ready,
)
from tests.fakes.scripted_detok import DetokScript, output
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

HALF = DetokScript([output("Hel", started=True), output("lo")])
SILENT = DetokScript([])


@pytest.fixture
async def other(line: GatewayLine) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a second gateway on the same line."""
    async with (
        serving_gateway(line.settings) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client,
    ):
        await until_ready(client)
        yield client


@pytest.fixture
async def redis(valkey: Valkey) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey.url, decode_responses=True) as client:
        yield client


async def start(
    line: GatewayLine, request_id: str, endpoint: str = "chat", **fields: object
) -> asyncio.Task[httpx2.Response]:
    """Sends a request of that id and waits until it is live at the detokenizer."""
    before = len(line.detok.submitted)
    line.client.headers["x-request-id"] = request_id
    task = asyncio.create_task(line.send(endpoint, **fields))
    await until(lambda: len(line.detok.submitted) > before)
    del line.client.headers["x-request-id"]
    return task


async def live(client: httpx2.AsyncClient) -> list[dict[str, object]]:
    return list((await client.get("/v1/requests")).json()["data"])


async def cancelled(client: httpx2.AsyncClient, request_id: str) -> dict[str, object]:
    """Cancels, once the request is known in the ledger."""
    response = await eventually(
        lambda: client.delete(f"/v1/requests/{request_id}"),
        lambda answer: answer.status_code != 404,
    )
    assert response.status_code == 200
    return dict(response.json())


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_a_cancelled_stream_ends_with_a_finish_reason_and_done(
    line: GatewayLine, endpoint: str
) -> None:
    line.detok.script = HALF
    task = await start(line, "one", endpoint, stream=True)
    answer = await cancelled(line.client, "one")
    assert answer["cancel_requested"] is True
    response = await task
    assert chunks_of(response)[-1]["finish_reason"] == "cancelled"
    assert streamed_text(response) in ("", "Hel", "Hello")
    record = await line.record("one")
    assert (record["state"], record["finish_reason"]) == ("finished", "cancelled")
    assert len(line.detok.aborted) == 1


async def test_a_cancelled_whole_answer_has_what_there_was(line: GatewayLine) -> None:
    line.detok.script = HALF
    task = await start(line, "one", n=2)
    await until(lambda: len(line.detok.submitted) == 2)
    await line.record_when("one", lambda record: record["num_output_tokens"] == 4)
    await cancelled(line.client, "one")
    choices = (await task).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["cancelled"] * 2
    assert [choice["message"]["content"] for choice in choices] == ["Hello"] * 2


@pytest.mark.parametrize("form", ["{}", "chatcmpl-{}"])
async def test_any_gateway_cancels_by_either_form_of_the_id(
    line: GatewayLine, other: httpx2.AsyncClient, form: str
) -> None:
    line.detok.script = SILENT
    task = await start(line, "far", stream=True)
    await cancelled(other, form.format("far"))
    assert chunks_of(await task)[-1]["finish_reason"] == "cancelled"


async def test_a_key_sees_and_cancels_its_own_requests_only(
    valkey: Valkey, redis_prefix: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(entry(name, name) for name in ("ann", "bob")))
    async with gateway_line(valkey.url, redis_prefix=redis_prefix, api_keys=keys) as line:
        line.detok.script = SILENT
        line.client.headers["authorization"] = "Bearer ann"
        task = await start(line, "hers", stream=True)
        async with (
            serving_gateway(line.settings) as port,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as other,
        ):
            await until_ready(other)
            await eventually(
                lambda: other.get("/v1/requests/hers", headers={"authorization": "Bearer ann"}),
                lambda answer: answer.status_code == 200,
            )
            for client in (line.client, other):
                client.headers["authorization"] = "Bearer bob"
                assert await live(client) == []
                assert (await client.get("/v1/requests/hers")).status_code == 404
                assert (await client.delete("/v1/requests/hers")).status_code == 404
            line.client.headers["authorization"] = "Bearer ann"
            assert [record["state"] for record in await live(line.client)] == ["waiting"]
            await cancelled(line.client, "hers")
            assert chunks_of(await task)[-1]["finish_reason"] == "cancelled"


async def test_a_cancel_is_idempotent(line: GatewayLine, other: httpx2.AsyncClient) -> None:
    line.detok.script = SILENT
    task = await start(line, "twice")
    await asyncio.gather(*(cancelled(client, "twice") for client in [other, line.client] * 3))
    await task
    for client in (other, line.client):
        answer = await eventually(partial(cancelled, client, "twice"), is_finished)
        assert answer["finish_reason"] == "cancelled"
        assert answer["cancel_requested"] is False
    assert len(line.detok.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancel_during_preprocessing_starts_nothing(
    line: GatewayLine, stream: bool
) -> None:
    line.tokenizer.gate.clear()
    line.client.headers["x-request-id"] = "early"
    task = asyncio.create_task(line.chat(stream=stream))
    await until(lambda: len(line.tokenizer.encoded) == 1)
    await cancelled(line.client, "early")
    response = await task
    assert response.status_code == 499
    assert response.json()["error"]["code"] == "request_cancelled"
    line.tokenizer.gate.set()
    record = await line.record("early")
    assert record["finish_reason"] == "cancelled"
    assert not line.detok.submitted


async def test_a_cancel_missed_while_disconnected_is_found_in_the_flag(
    line: GatewayLine, redis: Redis
) -> None:
    """The message is lost with the subscription; the flag is looked up when it is made again."""
    line.detok.script = SILENT
    task = await start(line, "flagged", stream=True)
    prefix = line.settings.redis_prefix
    key = f"{prefix}request:flagged"
    incarnation = await eventually(lambda: redis.hget(key, "incarnation"), bool)
    await redis.set(f"{prefix}cancel:flagged", incarnation, ex=60)
    await redis.client_kill_filter(_type="pubsub")
    assert chunks_of(await task)[-1]["finish_reason"] == "cancelled"


async def test_a_cancel_that_comes_before_the_record_is_kept_for_a_moment(
    line: GatewayLine, other: httpx2.AsyncClient
) -> None:
    # It gets no further than to its record, by which the flag is found.
    line.tokenizer.gate.clear()
    assert (await other.delete("/v1/requests/soon")).status_code == 404
    line.client.headers["x-request-id"] = "soon"
    response = await line.chat(stream=True)
    assert response.json()["error"]["code"] == "request_cancelled"
    line.tokenizer.gate.set()


async def test_a_flag_of_an_earlier_request_of_the_same_id_means_nothing(
    line: GatewayLine, redis: Redis
) -> None:
    await redis.set(f"{line.settings.redis_prefix}cancel:again", "an-older-one", ex=60)
    line.client.headers["x-request-id"] = "again"
    assert (await line.chat()).status_code == 200
    assert (await line.chat()).status_code == 200


async def test_live_requests_of_all_gateways_are_listed(
    line: GatewayLine, other: httpx2.AsyncClient
) -> None:
    line.detok.script = SILENT
    first = await start(line, "first")
    body = {"model": MODEL, "prompt": "x", "stream": True}
    second = asyncio.create_task(
        other.post("/v1/completions", json=body, headers={"x-request-id": "second"})
    )
    for client in (line.client, other):
        data = await eventually(partial(live, client), lambda data: len(data) == 2)
        assert [record["id"] for record in data] == ["first", "second"]
        assert {record["object"] for record in data} == {"request"}
        assert {record["endpoint"] for record in data} == {
            "/v1/chat/completions",
            "/v1/completions",
        }
    for request_id in ("first", "second"):
        await cancelled(other, request_id)
    await asyncio.gather(first, second)
    await eventually(partial(live, other), lambda data: not data)
