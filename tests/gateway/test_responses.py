"""/v1/responses as OpenAI's own client uses it, on one gateway and on another."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from gateway.new_api_key import entry
from protos.common.v1 import common_pb2
from protos.wire.errors import InternalError
from tests.fakes.gateway_line import MODEL, GatewayLine, gateway_line
from tests.fakes.openai_client import client_of, second_gateway
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = common_pb2.FINISH_REASON_LENGTH
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


@pytest.fixture
def line(tool_line: GatewayLine) -> GatewayLine:
    tool_line.reset()
    return tool_line


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
