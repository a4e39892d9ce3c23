"""A request's own timeout: 408 before the first token, what there is after it."""

import asyncio
import itertools
from typing import Any

import httpx2
import pytest

from protos.detok.v1 import detok_pb2
from tests.fakes.gateway_line import (
    GatewayLine,
    chunks_of,
    events_of,
    gateway_line,
    streamed_text,
    whole_text,
)
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDPOINTS = ["chat", "complete"]
SOON = 0.05
# Tried in turn: on a busy machine the first token may take longer than the first of them.
LATER = (0.2, 1.0, 5.0)


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


async def after_the_first_token(line: GatewayLine, endpoint: str, **fields: Any) -> httpx2.Response:
    """The answer to a request whose time is over after its first token."""
    for timeout in LATER:
        response = await line.send(endpoint, timeout=timeout, **fields)
        if response.status_code != 408:
            break
    return response


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_before_the_first_token_it_is_a_408(
    line: GatewayLine, endpoint: str, stream: bool, started: bool
) -> None:
    line.detok.script = DetokScript([output("", 0, started=True)] if started else [])
    response = await line.send(endpoint, stream=stream, timeout=SOON)
    assert response.status_code == 408
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("timeout_error", "timeout", "timeout")
    await until(lambda: len(line.detok.aborted) == len(line.detok.submitted))
    record = await line.record_when(response.headers["x-request-id"])
    assert record["finish_reason"] == "timeout"


@pytest.mark.asyncio(loop_scope="function")
async def test_once_a_ping_was_sent_it_is_an_error_event(valkey: Valkey, redis_prefix: str) -> None:
    silent = DetokScript([output("", 0, started=True)])
    async with gateway_line(
        valkey.url, silent, redis_prefix=redis_prefix, ping_seconds=SOON
    ) as line:
        response = await line.chat(stream=True, timeout=10 * SOON)
    assert response.text.startswith(": ping")
    (event,) = events_of(response)
    assert event["error"]["type"] == "timeout_error"


async def test_the_time_for_the_tokenizer_counts(line: GatewayLine) -> None:
    line.tokenizer.gate.clear()
    try:
        response = await line.chat(timeout=SOON)
    finally:
        line.tokenizer.gate.set()
    assert response.status_code == 408
    assert not line.detok.submitted


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_after_the_first_token_it_ends_with_what_there_is(
    line: GatewayLine, endpoint: str, stream: bool
) -> None:
    line.detok.script = pieces("some", " words", finish=None)
    response = await after_the_first_token(line, endpoint, stream=stream)
    if stream:
        assert streamed_text(response) == "some words"
        reasons = [chunk["finish_reason"] for chunk in chunks_of(response)]
        assert reasons[-1] == "timeout"
        assert set(reasons[:-1]) == {None}
        assert all("error" not in event for event in events_of(response))
    else:
        assert whole_text(response) == "some words"
        assert response.json()["choices"][0]["finish_reason"] == "timeout"
        assert response.json()["usage"]["completion_tokens"] == 2
    await until(lambda: not line.detok.live)
    record = await line.record_when(response.headers["x-request-id"])
    assert record["finish_reason"] == "timeout"


async def test_choices_that_have_ended_keep_their_reason(line: GatewayLine) -> None:
    made = itertools.cycle([pieces("done"), pieces("not", finish=None)])

    def one_of_each(submit: detok_pb2.Submit) -> DetokScript:
        return next(made)

    line.detok.script = one_of_each
    choices = (await after_the_first_token(line, "chat", n=2)).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "timeout"]
    assert [choice["message"]["content"] for choice in choices] == ["done", "not"]


async def test_a_request_in_time_is_left_alone(line: GatewayLine) -> None:
    response = await line.chat(timeout=60)
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert not line.detok.aborted


async def test_a_cancel_in_time_is_a_cancel(line: GatewayLine) -> None:
    line.detok.script = pieces("some", finish=None)
    line.client.headers["x-request-id"] = "cancelled-in-time"
    answer = asyncio.create_task(line.chat(timeout=60))
    await until(lambda: bool(line.detok.live))
    await line.record_when("cancelled-in-time", lambda record: record["num_output_tokens"] == 1)
    assert (await line.client.delete("/v1/requests/cancelled-in-time")).status_code == 200
    response = await answer
    assert response.json()["choices"][0]["finish_reason"] == "cancelled"


async def test_the_line_is_told_the_time_that_is_left(line: GatewayLine) -> None:
    await line.chat(timeout=60)
    await line.chat()
    first, second = line.detok.submitted
    assert 0 < first.record.timeout_ms <= 60_250
    assert second.record.timeout_ms == 0
