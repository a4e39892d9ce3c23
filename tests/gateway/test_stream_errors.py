"""Errors of engines and detokenizers, before and after the first byte: KNOWN_FAULTS 22."""

import asyncio
import json
import re

import pytest

from gateway.records import FINISH_REASONS
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    TokenlineError,
    Unavailable,
)
from tests.fakes.gateway_line import MODEL, GatewayLine, data_of, streamed_text
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.waiting import until

FAULT = InternalError("The engine stumbled.", code="engine_fault")
MODEL_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


_TEXTS = re.compile(rb'"(?:content|text)":"(\d+)"')


def failing_after(num_tokens: int) -> tuple[DetokScript, asyncio.Event]:
    gate = asyncio.Event()
    outputs = [output(str(number)) for number in range(num_tokens)]
    script = DetokScript([*outputs, output(num_tokens=0, error=FAULT)], gates={num_tokens: gate})
    return script, gate


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("stream", [False, True])
async def test_bug_22_an_error_before_any_token_is_an_http_error(
    line: GatewayLine, endpoint: str, stream: bool
) -> None:
    line.detok.script = DetokScript([output(num_tokens=0, error=FAULT)])
    response = await line.send(endpoint, stream=stream)
    assert response.status_code == 500
    assert response.json() == {
        "error": {
            "message": "The engine stumbled.",
            "type": "server_error",
            "param": None,
            "code": "engine_fault",
        }
    }
    record = await line.record_when(response.headers["x-request-id"])
    assert record["finish_reason"] == "error"
    assert record["error"] == {"code": "engine_fault", "message": "The engine stumbled."}


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
async def test_bug_22_an_error_in_mid_stream_is_one_event_then_done(
    line: GatewayLine, num_tokens: int, endpoint: str
) -> None:
    failing, gate = failing_after(num_tokens)
    healthy_gate = asyncio.Event()
    healthy = pieces("fine", "!", gates={1: healthy_gate})
    line.detok.script = lambda submit: (
        failing if list(submit.record.prompt_token_ids) == list(b"hi") else healthy
    )
    other = asyncio.create_task(line.complete(prompt="other", stream=True))
    await until(lambda: len(line.detok.live) == 1)
    body = {**MODEL_BODY, "prompt": "hi"}
    received = b""
    async with line.client.stream("POST", f"/v1/{endpoint}", json=body) as response:
        assert response.status_code == 200
        request_id = response.headers["x-request-id"]
        async for data in response.aiter_raw():
            received += data
            # Tokens may have come merged; each is one digit.
            if len(b"".join(_TEXTS.findall(received))) == num_tokens:
                gate.set()
    assert received.count(b"[DONE]") == 1
    *chunks, error, done = [event for event in received.decode().split("\n\n") if event]
    assert data_of(done) == "[DONE]"
    assert json.loads(data_of(error))["error"]["code"] == "engine_fault"
    for chunk in chunks:
        assert json.loads(data_of(chunk))["choices"][0]["finish_reason"] is None
    record = await line.record_when(request_id)
    assert (record["state"], record["finish_reason"]) == ("finished", "error")
    healthy_gate.set()
    assert streamed_text(await other) == "fine!"


async def test_text_that_comes_with_the_error_is_sent_before_it(line: GatewayLine) -> None:
    gate = asyncio.Event()
    line.detok.script = DetokScript([output("a"), output("b", error=FAULT)], gates={1: gate})
    async with line.client.stream("POST", "/v1/chat/completions", json=MODEL_BODY) as response:
        received = b""
        async for data in response.aiter_raw():
            received += data
            gate.set()
    assert received.index(b'"content":"b"') < received.index(b'"error"')


async def test_one_failed_choice_ends_its_siblings(line: GatewayLine) -> None:
    def script(submit: detok_pb2.Submit) -> DetokScript:
        is_first = len(line.detok.submitted) == 1
        return DetokScript([output(num_tokens=0, error=FAULT)]) if is_first else DetokScript([])

    line.detok.script = script
    response = await line.chat(n=2)
    assert response.status_code == 500
    await until(lambda: len(line.detok.aborted) == 1)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Unavailable("Gone.", code="engine_lost"), 503, "service_unavailable_error"),
        (Overloaded("Full.", code="queue_full"), 429, "rate_limit_error"),
        (
            InvalidRequest("No.", code="kv_capacity", param="max_tokens"),
            400,
            "invalid_request_error",
        ),
    ],
)
async def test_errors_keep_their_kind(
    line: GatewayLine, error: TokenlineError, status: int, kind: str
) -> None:
    line.detok.script = DetokScript([output(num_tokens=0, error=error)])
    response = await line.chat()
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert response.json()["error"]["code"] == error.code
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_a_lost_detokenizer_costs_a_stream_a_pause_and_no_more(line: GatewayLine) -> None:
    gate = asyncio.Event()
    line.detok.script = pieces("a", "b", gates={1: gate})
    async with line.client.stream("POST", "/v1/chat/completions", json=MODEL_BODY) as response:
        events = response.aiter_text()
        received = await anext(events)
        line.detok.cut()
        await until(lambda: len(line.detok.submitted) == 2)
        gate.set()
        received += "".join([event async for event in events])
    assert '"error"' not in received
    assert re.findall('"content":"(.)"', received) == ["a", "b"]
    assert received.endswith("data: [DONE]\n\n")


def test_finish_reasons_cover_the_contract() -> None:
    reasons = set(common_pb2.FinishReason.values()) - {common_pb2.FINISH_REASON_UNSPECIFIED}
    assert set(FINISH_REASONS) == reasons
