"""A request's own timeout: 408 before the first token, what there is after it."""

import asyncio

import pytest

from protos.detok.v1 import detok_pb2
from tests.fakes.gateway_line import (
    GatewayLine,
    chunks_of,
    events_of,
    streamed_text,
    whole_text,
)
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDPOINTS = ["chat", "complete"]
SOON = 0.05


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


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
    await until(lambda: not line.detok.live)
    assert len(line.detok.aborted) == 1
    record = await line.record_when(response.headers["x-request-id"])
    assert record["finish_reason"] == "timeout"


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
    response = await line.send(endpoint, stream=stream, timeout=0.3)
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
    ended = pieces("done")
    hanging = pieces("not", finish=None)
    made = iter([ended, hanging])

    def one_of_each(submit: detok_pb2.Submit) -> DetokScript:
        return next(made)

    line.detok.script = one_of_each
    choices = (await line.chat(n=2, timeout=0.3)).json()["choices"]
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
