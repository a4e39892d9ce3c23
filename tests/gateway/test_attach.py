"""What one gateway does with idempotency keys and with the ids of events."""

import asyncio
import hashlib

import msgspec
import pytest

from gateway.call import decode_call
from protos.wire.errors import Unavailable
from tests.fakes.counted_stream import (
    BODY,
    PATH,
    STREAMED,
    TEXT,
    Counting,
    assert_whole,
    read_until,
    stream,
    text_of,
)
from tests.fakes.gateway_line import MODEL, GatewayLine, eventually, whole_text
from tests.fakes.ledgers import ledger_side
from tests.fakes.scripted_detok import pieces
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until


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
