"""Requests with an Idempotency-Key, and streams that go on: at the same gateway and at others."""

import asyncio
import hashlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest

from gateway.call import decode_call
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import Unavailable
from tests.fakes.gateway_line import (
    MODEL,
    GatewayLine,
    data_of,
    eventually,
    gateway_line,
    whole_text,
)
from tests.fakes.gateway_process import gateway_process
from tests.fakes.ledgers import ledger_side
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

NUM_TOKENS = 12
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAMED = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
PATH = "/v1/chat/completions"


class Counting:
    """A script that counts, up to a gate."""

    def __init__(self, gate_at: int = NUM_TOKENS) -> None:
        self.gate = asyncio.Event()
        outputs = [output(f"{number} ", started=not number) for number in range(NUM_TOKENS)]
        for number, made in enumerate(outputs):
            made.token_ids[:] = [number]
        outputs[-1].finish.reason = common_pb2.FINISH_REASON_LENGTH
        self._script = DetokScript(outputs, gates={gate_at: self.gate})

    def __call__(self, submit: detok_pb2.Submit) -> DetokScript:
        return self._script


TEXT = "".join(f"{number} " for number in range(NUM_TOKENS))


@asynccontextmanager
async def stream(
    client: httpx2.AsyncClient, method: str = "POST", path: str = PATH, **headers: str
) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The events of a stream, each with its id; [DONE] as the word."""
    body = None if method == "GET" else STREAMED
    async with client.stream(method, path, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield events_of(response)


async def events_of(response: httpx2.Response) -> AsyncIterator[tuple[str, Any]]:
    pending = ""
    async for piece in response.aiter_text():
        *events, pending = (pending + piece).split("\n\n")
        for event in events:
            if event.startswith(":"):
                continue
            event_id, _, _ = event.removeprefix("id: ").partition("\n")
            data = data_of(event)
            yield event_id, data if data == "[DONE]" else json.loads(data)


def text_of(events: Sequence[tuple[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for _, event in events
        if event != "[DONE]"
        for choice in event["choices"]
    )


async def read_until(events: AsyncIterator[tuple[str, Any]], last: int) -> list[tuple[str, Any]]:
    """The events up to the one that covers `last` tokens."""
    read = []
    async for event in events:
        read.append(event)
        if int(event[0]) >= last:
            break
    return read


def assert_whole(first: list[tuple[str, Any]], rest: list[tuple[str, Any]]) -> None:
    """`rest` is what followed `first` in an unbroken stream."""
    assert text_of(first + rest) == TEXT
    assert rest[-1][1] == "[DONE]"
    usage = rest[-2][1]["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (NUM_TOKENS, NUM_TOKENS + 2)
    ids = [int(event_id) for event_id, event in first + rest if event != "[DONE]"]
    assert ids[:-1] == sorted(set(ids[:-1])), "ids increase strictly up to the usage"
    assert "role" not in str(rest)
    assert [
        choice["finish_reason"]
        for _, event in rest
        if event != "[DONE]"
        for choice in event["choices"]
    ][-1] == "length"


async def test_a_stream_broken_at_its_client_goes_on_by_key(line: GatewayLine) -> None:
    script = line.detok.script = Counting(5)
    async with stream(line.client, **{"idempotency-key": "k"}) as events:
        first = await read_until(events, 5)
    await asyncio.sleep(0)
    script.gate.set()
    headers = {"idempotency-key": "k", "last-event-id": first[-1][0]}
    async with stream(line.client, **headers) as events:
        rest = [event async for event in events]
    assert_whole(first, rest)
    assert len(line.detok.submitted) == 1
    assert not line.detok.aborted


async def test_the_answer_is_replayed_to_a_repeated_request(line: GatewayLine) -> None:
    headers = {"idempotency-key": "k"}
    line.detok.script = pieces("once")
    first = await line.client.post(PATH, json=BODY, headers=headers)
    line.detok.script = pieces("twice")
    again = await line.client.post(PATH, json=BODY, headers=headers)
    assert whole_text(first) == whole_text(again) == "once"
    assert first.content == again.content
    assert first.headers["x-request-id"] == again.headers["x-request-id"]
    assert len(line.detok.submitted) == 1


async def test_requests_at_the_same_time_share_one_run(line: GatewayLine) -> None:
    gate = asyncio.Event()
    line.detok.script = pieces("a", "b", gates={1: gate})
    tasks = [
        asyncio.create_task(
            line.client.post(PATH, json=BODY, headers={"idempotency-key": "together"})
        )
        for _ in range(3)
    ]
    await until(lambda: len(line.detok.live) == 1)
    gate.set()
    assert {answer.content for answer in await asyncio.gather(*tasks)} == {
        tasks[0].result().content
    }
    assert len(line.detok.submitted) == 1


async def test_a_key_with_another_body_is_refused(line: GatewayLine) -> None:
    headers = {"idempotency-key": "k"}
    await line.client.post(PATH, json=BODY, headers=headers)
    refused = await line.client.post(PATH, json={**BODY, "n": 2}, headers=headers)
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "idempotency_key_reused"
    other = await line.client.post(
        "/v1/completions", json={"model": MODEL, "prompt": "hi"}, headers=headers
    )
    assert other.status_code == 200, "a key is of one endpoint"


@pytest.mark.parametrize("keys", [[""], ["a b"], ["é"], ["x" * 257], ["a", "b"]])
async def test_a_key_of_no_use_is_refused(line: GatewayLine, keys: list[str]) -> None:
    headers = [(b"idempotency-key", key.encode()) for key in keys]
    refused = await line.client.post(PATH, json=BODY, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "idempotency-key"


async def test_what_may_go_better_is_tried_anew(line: GatewayLine) -> None:
    headers = {"idempotency-key": "k"}
    line.tokenizer.error = Unavailable("Away.", code="away")
    assert (await line.client.post(PATH, json=BODY, headers=headers)).status_code == 503
    line.tokenizer.error = None

    async def again() -> bool:
        answer = await line.client.post(PATH, json=BODY, headers=headers)
        return answer.status_code == 200

    async with asyncio.timeout(20):
        while not await again():
            await asyncio.sleep(0.05)


async def test_a_request_that_is_wrong_stays_wrong(line: GatewayLine) -> None:
    headers = {"idempotency-key": "k"}
    body = {**BODY, "max_tokens": 1_000_000}
    answers = [await line.client.post(PATH, json=body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json() == answers[1].json()
    assert len(line.tokenizer.encoded) == 1


@pytest.mark.parametrize("event_id", ["x", "-1", "1.2", "9" * 10, "99999", "1."])
async def test_an_event_id_of_no_use_is_refused(line: GatewayLine, event_id: str) -> None:
    line.detok.script = Counting()
    headers = {"idempotency-key": "k", "last-event-id": event_id}
    refused = await line.client.post(PATH, json=STREAMED, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "last-event-id"


async def test_events_are_told_to_whoever_asks_for_them(line: GatewayLine) -> None:
    script = line.detok.script = Counting(5)
    async with stream(line.client) as events:
        first = await read_until(events, 5)
        request_id = first[0][1]["id"]
        path = f"/v1/requests/{request_id}/events"
        async with stream(line.client, "GET", path, **{"last-event-id": "3"}) as others:
            script.gate.set()
            rest = [event async for event in others]
    assert text_of(rest) == TEXT.partition("2 ")[2]
    assert rest[-1][1] == "[DONE]"
    whole = await line.client.post(PATH, json=BODY, headers={"x-request-id": "whole"})
    assert whole.status_code == 200
    for unknown in ("whole", "unheard-of"):
        refused = await line.client.get(f"/v1/requests/{unknown}/events")
        assert refused.status_code == 404


@asynccontextmanager
async def two_gateways(
    valkey: Valkey, prefix: str, script: Counting, **fields: Any
) -> AsyncIterator[tuple[GatewayLine, Any]]:
    """A line, and another gateway of it that can be killed."""
    async with (
        gateway_line(valkey.url, redis_prefix=prefix, ping_seconds=0.5, **fields) as line,
        gateway_process(line.settings) as other,
    ):
        line.detok.script = script
        yield line, other


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_stream_goes_on_at_another_gateway_when_its_own_is_killed(
    valkey: Valkey, redis_prefix: str, keyed: bool
) -> None:
    script = Counting(6)
    async with two_gateways(valkey, redis_prefix, script) as (line, other):
        headers = {"idempotency-key": "k"} if keyed else {}
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
        assert {event["id"] for _, event in first + rest if event != "[DONE]"} == {
            first[0][1]["id"]
        }


async def test_a_client_may_read_along_at_any_gateway(valkey: Valkey, redis_prefix: str) -> None:
    script = Counting(6)
    async with two_gateways(valkey, redis_prefix, script) as (line, other):
        headers = {"idempotency-key": "k"}
        async with stream(other.client, **headers) as events:
            first = await read_until(events, 3)
            headers["last-event-id"] = first[-1][0]
            async with stream(line.client, **headers) as followed:
                script.gate.set()
                rest = [event async for event in followed]
        assert_whole(first, rest)
        assert len(line.detok.submitted) == 1


@pytest.mark.parametrize("wrong", [{"max_tokens": 1_000_000}, {"timeout": 0.000_001}])
async def test_a_request_that_ended_before_it_started_is_answered_by_any_gateway(
    valkey: Valkey, redis_prefix: str, wrong: dict[str, float]
) -> None:
    async with two_gateways(valkey, redis_prefix, Counting()) as (line, other):
        headers = {"idempotency-key": "k"}
        async with asyncio.timeout(20):
            first, again = [
                await client.post(PATH, json={**BODY, **wrong}, headers=headers)
                for client in (other.client, line.client)
            ]
        assert first.status_code in (400, 408)
        assert (again.status_code, again.json()) == (first.status_code, first.json())
        assert not line.detok.submitted


async def test_a_key_keeps_its_answer_when_another_request_uses_the_id_again(
    valkey: Valkey, redis_prefix: str
) -> None:
    async with two_gateways(valkey, redis_prefix, Counting()) as (line, other):
        ours = {"idempotency-key": "k", "x-request-id": "same"}
        line.detok.script = pieces("ours")
        first = await other.client.post(PATH, json=BODY, headers=ours)
        line.detok.script = pieces("theirs")
        theirs = {"idempotency-key": "l", "x-request-id": "same"}
        second = await line.client.post(PATH, json=BODY, headers=theirs)
        again = await line.client.post(PATH, json=BODY, headers=ours)
        assert (whole_text(first), whole_text(second)) == ("ours", "theirs")
        assert again.content == first.content


async def test_a_client_that_read_along_and_left_may_come_again(
    valkey: Valkey, redis_prefix: str
) -> None:
    script = Counting(6)
    async with two_gateways(valkey, redis_prefix, script) as (line, other):
        headers = {"idempotency-key": "k"}
        async with stream(other.client, **headers) as events:
            first = await read_until(events, 3)
            for _ in range(5):
                async with stream(line.client, **headers) as followed:
                    await read_until(followed, 3)
            headers["last-event-id"] = first[-1][0]
            async with stream(line.client, **headers) as followed:
                script.gate.set()
                rest = [event async for event in followed]
        assert_whole(first, rest)
        assert len(line.detok.submitted) == 1


async def test_a_claim_that_no_gateway_runs_is_run_by_who_is_asked(
    valkey: Valkey, redis_prefix: str, line: GatewayLine
) -> None:
    """As one that reached Redis after its gateway, which lives, had given up on the reply."""
    line.detok.script = Counting()
    async with stream(line.client, **{"idempotency-key": "run"}) as events:
        request_id = (await anext(events))[1]["id"].removeprefix("chatcmpl-")
    async with ledger_side(valkey.url, "another", redis_prefix) as other:
        run = await eventually(
            lambda: other.ledger.find_run(request_id), lambda found: found is not None
        )
        digest = hashlib.sha256(repr(("", PATH, "never-run")).encode()).hexdigest()
        call = msgspec.structs.replace(
            decode_call(run.call), request_id="never-run", key_digest=digest
        )
        body_digest = hashlib.sha256(call.body).hexdigest()
        await other.ledger.claim(digest, body_digest, "never-run", call.encode())
        async with stream(line.client, **{"idempotency-key": "never-run"}) as events:
            read = [event async for event in events]
    assert text_of(read) == TEXT
    assert read[0][1]["id"] == "chatcmpl-never-run"


async def test_a_gateway_that_stood_still_follows_the_one_that_took_its_request(
    valkey: Valkey, redis_prefix: str
) -> None:
    script = Counting(6)
    async with two_gateways(valkey, redis_prefix, script) as (line, other):
        headers = {"idempotency-key": "k"}
        async with stream(other.client, **headers) as old:
            first = await read_until(old, 6)
            other.send_signal(signal.SIGSTOP)
            async with stream(line.client, **headers) as new:
                read = await read_until(new, 6)
                await until(lambda: len(line.detok.submitted) == 2)
                other.send_signal(signal.SIGCONT)
                await until(lambda: len(line.detok.aborted) == 1, "the old one's sequence to end")
                script.gate.set()
                assert text_of(read + [event async for event in new]) == TEXT
            assert_whole(first, [event async for event in old])
        record = await line.record_when(first[0][1]["id"])
        assert (record["finish_reason"], record["num_output_tokens"]) == ("length", NUM_TOKENS)


async def test_a_drained_gateway_hands_its_streams_over(valkey: Valkey, redis_prefix: str) -> None:
    script = Counting(6)
    async with two_gateways(valkey, redis_prefix, script) as (line, other):
        headers = {"idempotency-key": "k"}
        async with stream(other.client, **headers) as events:
            first = await read_until(events, 6)
            stopping = asyncio.create_task(other.stop())
            with pytest.raises(httpx2.RemoteProtocolError):
                await anext(events)
        headers["last-event-id"] = first[-1][0]
        async with stream(line.client, **headers) as events:
            await until(lambda: len(line.detok.submitted) == 2)
            script.gate.set()
            rest = [event async for event in events]
        assert_whole(first, rest)
        await stopping


async def test_responses_in_the_background_outlive_their_gateway(
    valkey: Valkey, redis_prefix: str
) -> None:
    """What was not streamed is completed; what was is told to have failed, not left for ever."""
    script = Counting(6)
    body = {"model": MODEL, "input": "hi", "background": True}
    async with two_gateways(valkey, redis_prefix, script) as (line, other):
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
