"""Streams and keys at two gateways: read along, and taken over from one that is gone."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from tests.fakes.counted_stream import (
    BODY,
    NUM_TOKENS,
    PATH,
    TEXT,
    Counting,
    assert_whole,
    read_until,
    stream,
    text_of,
)
from tests.fakes.gateway_line import MODEL, GatewayLine, gateway_line, whole_text
from tests.fakes.gateway_process import GatewayProcess, gateway_process
from tests.fakes.scripted_detok import pieces
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

KEY = {"idempotency-key": "k"}
Event = tuple[str, Any]


@pytest.fixture
def script() -> Counting:
    return Counting(6)


@pytest.fixture
async def line(valkey: Valkey, redis_prefix: str, script: Counting) -> AsyncIterator[GatewayLine]:
    async with gateway_line(valkey.url, redis_prefix=redis_prefix, ping_seconds=0.5) as running:
        running.detok.script = script
        yield running


@pytest.fixture
async def other(line: GatewayLine) -> AsyncIterator[GatewayProcess]:
    """Another gateway of the line, which can be killed."""
    async with gateway_process(line.settings) as running:
        yield running


@asynccontextmanager
async def keyed_stream(
    client: httpx2.AsyncClient, last: int
) -> AsyncIterator[tuple[AsyncIterator[Event], list[Event]]]:
    """A stream by key, and what was read of it: up to the event that covers `last` tokens."""
    async with stream(client, **KEY) as events:
        yield events, await read_until(events, last)


def after(read: list[Event]) -> dict[str, str]:
    """The headers that ask for the rest of a stream by key."""
    return {**KEY, "last-event-id": read[-1][0]}


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_stream_goes_on_at_another_gateway_when_its_own_is_killed(
    line: GatewayLine, other: GatewayProcess, script: Counting, keyed: bool
) -> None:
    headers = dict(KEY) if keyed else {}
    async with stream(other.client, **headers) as events:
        first = await read_until(events, 6)
        # Without a key, all that is left of a request is what was written of it.
        await asyncio.sleep(0 if keyed else 0.6)
        await other.kill()
    script.gate.set()
    method, path = "POST", PATH
    if not keyed:
        method, path = "GET", f"/v1/requests/{first[0][1]['id']}/events"
    headers["last-event-id"] = first[-1][0]
    async with stream(line.client, method, path, **headers) as events:
        rest = [event async for event in events]
    assert_whole(first, rest)
    assert {event["id"] for _, event in first + rest if event != "[DONE]"} == {first[0][1]["id"]}


async def test_a_client_may_read_along_at_any_gateway(
    line: GatewayLine, other: GatewayProcess, script: Counting
) -> None:
    async with (
        keyed_stream(other.client, 3) as (_, first),
        stream(line.client, **after(first)) as followed,
    ):
        script.gate.set()
        rest = [event async for event in followed]
    assert_whole(first, rest)
    assert len(line.detok.submitted) == 1


@pytest.mark.parametrize("wrong", [{"max_tokens": 1_000_000}, {"timeout": 0.000_001}])
async def test_a_request_that_ended_before_it_started_is_answered_by_any_gateway(
    line: GatewayLine, other: GatewayProcess, wrong: dict[str, float]
) -> None:
    async with asyncio.timeout(20):
        first, again = [
            await client.post(PATH, json={**BODY, **wrong}, headers=KEY)
            for client in (other.client, line.client)
        ]
    assert first.status_code in (400, 408)
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert not line.detok.submitted


async def test_a_key_keeps_its_answer_when_another_request_uses_the_id_again(
    line: GatewayLine, other: GatewayProcess
) -> None:
    ours = {**KEY, "x-request-id": "same"}
    line.detok.script = pieces("ours")
    first = await other.client.post(PATH, json=BODY, headers=ours)
    line.detok.script = pieces("theirs")
    theirs = {"idempotency-key": "l", "x-request-id": "same"}
    second = await line.client.post(PATH, json=BODY, headers=theirs)
    again = await line.client.post(PATH, json=BODY, headers=ours)
    assert (whole_text(first), whole_text(second)) == ("ours", "theirs")
    assert again.content == first.content


async def test_a_client_that_read_along_and_left_may_come_again(
    line: GatewayLine, other: GatewayProcess, script: Counting
) -> None:
    async with keyed_stream(other.client, 3) as (_, first):
        for _ in range(5):
            async with keyed_stream(line.client, 3):
                pass
        async with stream(line.client, **after(first)) as followed:
            script.gate.set()
            rest = [event async for event in followed]
    assert_whole(first, rest)
    assert len(line.detok.submitted) == 1


async def test_a_gateway_that_stood_still_follows_the_one_that_took_its_request(
    line: GatewayLine, other: GatewayProcess, script: Counting
) -> None:
    async with keyed_stream(other.client, 6) as (old, first):
        other.send_signal(signal.SIGSTOP)
        async with keyed_stream(line.client, 6) as (new, read):
            await until(lambda: len(line.detok.submitted) == 2)
            other.send_signal(signal.SIGCONT)
            await until(lambda: len(line.detok.aborted) == 1, "the old one's sequence to end")
            script.gate.set()
            assert text_of(read + [event async for event in new]) == TEXT
        assert_whole(first, [event async for event in old])
    record = await line.record_when(first[0][1]["id"])
    assert (record["finish_reason"], record["num_output_tokens"]) == ("length", NUM_TOKENS)


async def test_a_drained_gateway_hands_its_streams_over(
    line: GatewayLine, other: GatewayProcess, script: Counting
) -> None:
    async with keyed_stream(other.client, 6) as (events, first):
        stopping = asyncio.create_task(other.stop())
        with pytest.raises(httpx2.RemoteProtocolError):
            await anext(events)
    async with stream(line.client, **after(first)) as events:
        await until(lambda: len(line.detok.submitted) == 2)
        script.gate.set()
        rest = [event async for event in events]
    assert_whole(first, rest)
    await stopping


async def test_responses_in_the_background_outlive_their_gateway(
    line: GatewayLine, other: GatewayProcess, script: Counting
) -> None:
    """What was not streamed is completed; what was is told to have failed, not left for ever."""
    body = {"model": MODEL, "input": "hi", "background": True}
    whole = (await other.client.post("/v1/responses", json=body)).json()["id"]
    async with other.client.stream(
        "POST", "/v1/responses", json={**body, "stream": True}
    ) as response:
        async for first in response.aiter_lines():
            if first.startswith("data: "):
                streamed = json.loads(first.removeprefix("data: "))["response"]["id"]
                break
        await until(lambda: len(line.detok.live) == 2)
        await asyncio.sleep(0.6)
        await other.kill()
    script.gate.set()

    async def ended(response_id: str) -> Any:
        found = (await line.client.get(f"/v1/responses/{response_id}")).json()
        return found if found["status"] not in ("queued", "in_progress") else None

    async with asyncio.timeout(30):
        while not (completed := await ended(whole)) or not (failed := await ended(streamed)):
            await asyncio.sleep(0.1)
    assert completed["output"][0]["content"][0]["text"] == TEXT
    assert (failed["status"], failed["error"]["code"]) == ("failed", "gateway_lost")
    events = (await line.client.get(f"/v1/responses/{streamed}?stream=true")).text
    assert "event: response.failed" in events
