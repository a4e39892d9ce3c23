"""Who is let in: limits, ids, identity, drain."""

import asyncio

import pytest

from tests.fakes.gateway_line import (
    MODEL,
    GatewayLine,
    gateway_line,
    serving_gateway,
    until_ready,
    whole_text,
)
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

SILENT = DetokScript([])


async def test_beyond_the_limit_requests_get_429_and_retry_after(
    valkey: Valkey, redis_prefix: str
) -> None:
    async with gateway_line(valkey.url, redis_prefix=redis_prefix, max_live_requests=2) as line:
        gate = asyncio.Event()
        line.detok.script = pieces("ok", gates={0: gate})
        running = [asyncio.create_task(line.chat()) for _ in range(2)]
        await until(lambda: len(line.detok.live) == 2)
        for stream in (False, True):
            refused = await line.chat(stream=stream)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        for task in running:
            assert whole_text(await task) == "ok"
        assert (await line.chat()).status_code == 200


async def test_a_request_id_is_taken_over_returned_and_unique_while_live(
    line: GatewayLine,
) -> None:
    gate = asyncio.Event()
    line.detok.script = pieces("ok", gates={0: gate})
    line.client.headers["x-request-id"] = "mine/1?#"
    first = asyncio.create_task(line.chat())
    await until(lambda: len(line.detok.live) == 1)
    second = await line.chat()
    assert second.status_code == 409
    assert second.json()["error"]["param"] == "x-request-id"
    gate.set()
    response = await first
    assert response.headers["x-request-id"] == "mine/1?#"
    assert response.json()["id"] == "chatcmpl-mine/1?#"
    assert line.detok.submitted[0].request_id == "mine/1?#"
    assert (await line.chat()).status_code == 200
    assert (await line.record("mine%2F1%3F%23"))["id"] == "mine/1?#"


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "é", "a\tb"])
async def test_a_bad_request_id_is_400(line: GatewayLine, request_id: str) -> None:
    headers = {"x-request-id": request_id.encode()}
    body = {"model": MODEL, "prompt": "hi"}
    response = await line.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-id"
    # It is not taken over where it does not matter either.
    response = await line.client.get("/healthz", headers=headers)
    assert response.status_code == 200
    assert response.headers["x-request-id"] != request_id


async def test_the_longest_request_id_is_accepted(line: GatewayLine) -> None:
    line.client.headers["x-request-id"] = "~" * 128
    assert (await line.chat()).status_code == 200


async def test_a_trace_goes_on_in_a_span_of_its_own(line: GatewayLine) -> None:
    trace, parent = "ab" * 16, "cd" * 8
    line.client.headers["traceparent"] = f"00-{trace}-{parent}-01"
    await line.chat(n=2)
    line.client.headers["traceparent"] = "nonsense"
    await line.chat()
    first, second, other = (submit.traceparent for submit in line.detok.submitted)
    assert first == second
    assert first.startswith(f"00-{trace}-") and parent not in first
    assert other.startswith("00-") and trace not in other


async def test_a_drain_lets_requests_finish_and_takes_no_more(
    valkey: Valkey, line: GatewayLine
) -> None:
    gate = asyncio.Event()
    line.detok.script = pieces("a", "b", gates={1: gate})
    settings = line.settings
    drained = asyncio.Event()

    async def serve() -> str:
        patient = type(settings)(**{**vars(settings), "drain_seconds": 60.0})
        async with serving_gateway(patient) as port:
            line.client.base_url = f"http://127.0.0.1:{port}"
            await until_ready(line.client)
            task = asyncio.create_task(line.chat(stream=True))
            await until(lambda: len(line.detok.live) == 1)
            asyncio.get_running_loop().call_soon(drained.set)
        return (await task).text

    serving = asyncio.create_task(serve())
    await drained.wait()

    async def not_ready() -> bool:
        answer = await line.client.get("/readyz")
        return answer.status_code == 503 and "draining" in answer.text

    while not await not_ready():
        await asyncio.sleep(0.01)
    refused = await line.chat()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert (await line.client.get("/healthz")).status_code == 200
    gate.set()
    text = await serving
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in text


async def test_a_drain_that_runs_out_of_time_cancels_what_nobody_can_come_back_to(
    line: GatewayLine,
) -> None:
    line.detok.script = DetokScript([output("a")])
    async with serving_gateway(line.settings) as port:
        line.client.base_url = f"http://127.0.0.1:{port}"
        await until_ready(line.client)
        task = asyncio.create_task(line.chat())
        await until(lambda: len(line.detok.live) == 1)
    assert (await task).json()["choices"][0]["finish_reason"] == "cancelled"
    assert len(line.detok.aborted) == 1
