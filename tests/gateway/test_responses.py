"""/v1/responses as OpenAI's own client uses it, on one gateway and on another."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from gateway.new_api_key import entry
from protos.common.v1 import common_pb2
from protos.wire.errors import InternalError
from tests.fakes.gateway_line import MODEL, GatewayLine, eventually, gateway_line, serving_gateway
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = ["<tool_call>\n", '{"name": "weather", ', '"arguments": {"city": "Rome"}}', "\n</tool_call>"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_line(valkey: Valkey) -> AsyncIterator[GatewayLine]:
    settings: Any = {"tool_call_format": "hermes", "reasoning": "on"}
    async with gateway_line(valkey.url, redis_prefix="responses:", **settings) as running:
        yield running


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


def client_of(url: str, api_key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)


@pytest_asyncio.fixture(loop_scope="module")
async def client(line: GatewayLine) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(line.url) as made:
        yield made


@asynccontextmanager
async def second_gateway(line: GatewayLine) -> AsyncIterator[AsyncOpenAI]:
    """A client of another gateway of the same line."""
    async with (
        serving_gateway(line.settings) as port,
        client_of(f"http://127.0.0.1:{port}") as made,
    ):
        yield made


def messages_of(line: GatewayLine) -> list[dict[str, Any]]:
    """The chat that the tokenizer was given last."""
    messages: list[dict[str, Any]] = json.loads(line.tokenizer.encoded[-1].chat.messages_json)
    return messages


async def test_a_response_is_typed_as_the_client_expects(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    response = await client.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"}, user="me"
    )
    assert response.id.startswith("resp_") and response.object == "response"
    assert response.status == "completed" and response.output_text == "Hello there"
    [message] = response.output
    assert message.type == "message" and message.role == "assistant"
    assert message.content[0].type == "output_text" and message.content[0].annotations == []
    assert response.usage is not None and response.usage.output_tokens == 3
    assert response.usage.total_tokens == response.usage.input_tokens + 3
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief."
    assert messages_of(line) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


async def test_events_have_their_names_and_numbers_and_add_up(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    stream = await client.responses.create(model=MODEL, input="hi", stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last: Any = events[-1]
    assert "".join(deltas) == last.response.output_text == "Hello there"
    assert last.response.usage.output_tokens == 3


async def test_the_clients_own_stream_helper_follows(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    async with client.responses.stream(model=MODEL, input="hi") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "Hello there"


async def test_streamed_and_whole_are_the_same(line: GatewayLine, client: AsyncOpenAI) -> None:
    line.detok.script = pieces("<think>hm", " so</think>", "The ", "end", *CALL)
    arguments: Any = {"model": MODEL, "input": "hi", "tools": [WEATHER]}
    whole = (await client.responses.create(**arguments)).to_dict()
    stream = await client.responses.create(**arguments, stream=True)
    [*_, last] = [event async for event in stream]
    streamed: Any = last.to_dict()["response"]
    for response in (whole, streamed):
        del response["id"], response["created_at"], response["completed_at"]
        for item in response["output"]:
            del item["id"]
            item.pop("call_id", None)
    assert whole == streamed
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]


async def test_a_tool_loop_of_two_turns(line: GatewayLine, client: AsyncOpenAI) -> None:
    for streamed in (False, True):
        line.detok.script = pieces(*CALL)
        asked: Any = {"model": MODEL, "input": "Rain?", "tools": [WEATHER], "tool_choice": "auto"}
        if streamed:
            stream = await client.responses.create(**asked, stream=True)
            events = [event async for event in stream]
            first = events[-1].response
            pieces_of = "".join(
                e.delta for e in events if e.type == "response.function_call_arguments.delta"
            )
            [done] = [e for e in events if e.type == "response.function_call_arguments.done"]
            assert pieces_of == done.arguments
        else:
            first = await client.responses.create(**asked)
        [call] = first.output
        assert call.type == "function_call" and call.name == "weather"
        assert json.loads(call.arguments) == {"city": "Rome"}
        line.detok.script = pieces("It is dry.")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
        second = await client.responses.create(
            model=MODEL, previous_response_id=first.id, input=[result], tools=[WEATHER]
        )
        assert second.output_text == "It is dry."
        user, assistant, tool = messages_of(line)
        assert user == {"role": "user", "content": "Rain?"}
        assert assistant["tool_calls"][0]["function"]["name"] == "weather"
        assert tool == {"role": "tool", "tool_call_id": call.call_id, "content": "dry"}


async def test_the_same_loop_with_the_items_given_again(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    line.detok.script = pieces("<think>hm</think>", *CALL)
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}]
    first = await client.responses.create(model=MODEL, input=items, tools=[WEATHER], store=False)
    call: Any = first.output[-1]
    items += [item.to_dict() for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "dry"})
    await client.responses.create(model=MODEL, input=items, tools=[WEATHER], store=False)
    assert [message["role"] for message in messages_of(line)] == ["user", "assistant", "tool"]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)


class Point(BaseModel):
    x: int
    y: int


async def test_parse_with_a_pydantic_model(line: GatewayLine, client: AsyncOpenAI) -> None:
    line.detok.script = pieces('{"x": 1,', ' "y": 2}')
    response = await client.responses.parse(model=MODEL, input="hi", text_format=Point)
    assert response.output_parsed == Point(x=1, y=2)
    grammar = line.detok.submitted[-1].record.sampling.grammar
    assert set(json.loads(grammar.json_schema)["properties"]) == {"x", "y"}


async def test_another_gateway_retrieves_continues_and_deletes(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    first = await client.responses.create(model=MODEL, input="one")
    async with second_gateway(line) as other:
        found = await other.responses.retrieve(first.id)
        assert found.to_dict() == first.to_dict()
        items = await other.responses.input_items.list(first.id)
        assert items.data[0].to_dict()["content"] == [{"type": "input_text", "text": "one"}]
        await other.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        contents = [message["content"] for message in messages_of(line)]
        assert contents == ["one", "Hello there", "two"]
        await other.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(first.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model=MODEL, input="a", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


async def test_length_is_incomplete(line: GatewayLine, client: AsyncOpenAI) -> None:
    line.detok.script = DetokScript([output("cut", finish=LENGTH)])
    response = await client.responses.create(model=MODEL, input="hi", max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    stream = await client.responses.create(model=MODEL, input="hi", stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_an_error_in_mid_stream_is_a_failed_response(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    line.detok.script = DetokScript(
        [output("be"), output(error=InternalError("The engine stumbled.", code="engine_fault"))]
    )
    stream = await client.responses.create(model=MODEL, input="hi", stream=True)
    [*_, last] = [event async for event in stream]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "The engine stumbled."


async def test_logprobs_come_where_they_are_included(
    line: GatewayLine, client: AsyncOpenAI
) -> None:
    await client.responses.create(
        model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    sampling = line.detok.submitted[-1].record.sampling
    assert sampling.logprobs and sampling.top_logprobs == 2


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1_000_000}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
)  # fmt: skip
async def test_bad_bodies_name_the_field(
    line: GatewayLine, client: AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "input": "hi", **fields}
    response = await line.client.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_without_redis_what_needs_it_is_503_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    with Valkey(tmp_path) as own:
        async with gateway_line(own.url) as running, client_of(running.url) as client:
            own.kill()
            plain = await client.responses.create(model=MODEL, input="hi")
            assert plain.output_text == "Hello there"
            assert plain.to_dict()["store"] is False
            for call in (
                client.responses.retrieve(plain.id),
                client.responses.create(model=MODEL, input="hi", store=True),
                client.responses.create(model=MODEL, input="hi", background=True),
                client.responses.create(model=MODEL, input="hi", previous_response_id="resp_a"),
            ):
                with pytest.raises(openai.InternalServerError) as caught:
                    await call
                assert caught.value.status_code == 503


async def test_tenants_see_their_own_responses_only(valkey: Valkey, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{entry('ann', 'a')}\n{entry('bob', 'b')}\n")
    settings: Any = {"api_keys": path}
    async with (
        gateway_line(valkey.url, redis_prefix="tenants:", **settings) as running,
        client_of(running.url, "a") as ann,
        client_of(running.url, "b") as bob,
    ):
        response = await ann.responses.create(model=MODEL, input="hi")
        assert (await ann.responses.retrieve(response.id)).id == response.id
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(response.id)
