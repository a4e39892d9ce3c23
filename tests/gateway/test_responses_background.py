"""/v1/responses in the background: ended, taken up again, cancelled, at any gateway."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from protos.common.v1 import common_pb2
from protos.wire.errors import InternalError
from tests.fakes.gateway_line import MODEL, GatewayLine, eventually
from tests.fakes.openai_client import second_gateway
from tests.fakes.scripted_detok import DetokScript, output

pytestmark = pytest.mark.asyncio(loop_scope="module")

STOP = common_pb2.FINISH_REASON_STOP


@pytest.fixture
def line(tool_line: GatewayLine) -> GatewayLine:
    tool_line.reset()
    return tool_line


async def in_background(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.responses.create(model=MODEL, input="hi", background=True, **fields)


async def ended(client: AsyncOpenAI, response_id: str) -> Any:
    return await eventually(
        lambda: client.responses.retrieve(response_id),
        lambda response: response.status not in ("queued", "in_progress"),
    )


async def test_a_background_response_ends_without_its_client(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    gate = asyncio.Event()
    line.detok.script = DetokScript([output("a"), output("b", finish=STOP)], gates={1: gate})
    response = await in_background(client)
    assert response.status == "queued" and response.background
    with pytest.raises(openai.ConflictError):
        await client.responses.create(model=MODEL, input="x", previous_response_id=response.id)
    gate.set()
    done = await ended(client, response.id)
    assert done.status == "completed" and done.output_text == "ab"


async def test_a_background_stream_is_taken_up_again_by_another_gateway(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    gate = asyncio.Event()
    line.detok.script = DetokScript([output("a"), output("b", finish=STOP)], gates={1: gate})
    stream = await in_background(client, stream=True)
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    response_id = seen[0].response.id
    async with second_gateway(line) as other:
        rest = await other.responses.retrieve(
            response_id, stream=True, starting_after=seen[-1].sequence_number
        )
        gate.set()
        seen += [event async for event in rest]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    assert seen[-1].response.output_text == "ab"
    for number in ("x", "-", "", "\N{SUPERSCRIPT TWO}", "9" * 11):
        refused = await line.client.get(
            f"/v1/responses/{response_id}", params={"stream": "true", "starting_after": number}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "starting_after"


async def test_a_background_response_is_cancelled_by_any_gateway(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    line.detok.script = DetokScript([output("a")])
    response = await in_background(client)
    async with second_gateway(line) as other:
        cancelled = await other.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert (await client.responses.retrieve(response.id)).status == "cancelled"


async def test_only_background_responses_are_cancelled_or_streamed_later(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    response = await client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.retrieve(response.id, stream=True)


async def test_a_background_failure_is_told(line: GatewayLine, client: AsyncOpenAI) -> None:
    line.tokenizer.error = InternalError("No tokens.")
    response = await in_background(client)
    done = await ended(client, response.id)
    assert done.status == "failed" and done.error.message == "No tokens."
