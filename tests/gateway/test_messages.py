"""/v1/messages as Anthropic's own client uses it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from pydantic import BaseModel

from gateway.new_api_key import entry
from protos.common.v1 import common_pb2
from protos.wire.errors import InternalError, Overloaded
from tests.fakes.gateway_line import MODEL, GatewayLine, gateway_line
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
USER: Any = {"role": "user", "content": "hi"}
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = ["<tool_call>\n", '{"name": "weather", ', '"arguments": {"city": "Rome"}}', "\n</tool_call>"]


@pytest.fixture
def line(tool_line: GatewayLine) -> GatewayLine:
    tool_line.reset()
    return tool_line


@pytest_asyncio.fixture(loop_scope="module")
async def client(line: GatewayLine) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=line.url, api_key="none", max_retries=0) as made:
        yield made


async def create(client: AsyncAnthropic, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 64, "messages": [USER], **fields}
    return await client.messages.create(**body)


def messages_of(line: GatewayLine) -> list[dict[str, Any]]:
    """The chat that the tokenizer was given last."""
    messages: list[dict[str, Any]] = json.loads(line.tokenizer.encoded[-1].chat.messages_json)
    return messages


async def test_a_message_is_typed_as_the_client_expects(
    line: GatewayLine, client: AsyncAnthropic
) -> None:
    message = await create(
        client,
        system="Be brief.",
        stop_sequences=["END"],
        extra_body={"temperature": 0.5, "top_k": 5},
    )
    assert message.id.startswith("msg_") and message.type == "message"
    assert message.role == "assistant" and message.model == MODEL
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": "Hello there"}
    ]
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.usage.input_tokens == len("Be brief.hi") and message.usage.output_tokens == 3
    assert messages_of(line) == [{"role": "system", "content": "Be brief."}, USER]
    submit = line.detok.submitted[-1]
    assert submit.record.sampling.max_tokens == 64 and submit.record.sampling.top_k == 5
    assert list(submit.stop) == ["END"]


async def test_events_follow_anthropics_order(line: GatewayLine, client: AsyncAnthropic) -> None:
    stream = await create(client, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.usage.input_tokens == 2
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens == 3


@pytest.mark.parametrize(
    "script",
    [
        pieces("Hello", " there"),
        pieces("<think>hm", " so</think>", "The ", "end", *CALL),
        pieces(*CALL, *CALL),
        DetokScript([output("cut", finish=LENGTH)]),
        DetokScript([output(finish=STOP)]),
    ],
)
async def test_what_the_clients_stream_adds_up_to_is_the_whole(
    line: GatewayLine, client: AsyncAnthropic, script: DetokScript
) -> None:
    line.detok.script = script
    body: Any = {"model": MODEL, "max_tokens": 64, "messages": [USER], "tools": [WEATHER]}
    whole = (await client.messages.create(**body)).to_dict()
    async with client.messages.stream(**body) as stream:
        streamed = (await stream.get_final_message()).to_dict()
    for message in (whole, streamed):
        del message["id"]
        for block in message["content"]:  # type: ignore[attr-defined]
            block.pop("id", None)
    assert streamed == whole


async def test_thoughts_are_blocks_of_their_own(line: GatewayLine, client: AsyncAnthropic) -> None:
    line.detok.script = pieces("<think>hm</think>", "So.")
    message = await create(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "hm"
    kwargs = json.loads(line.tokenizer.encoded[-1].chat.template_kwargs_json)
    assert kwargs == {"enable_thinking": True}


async def test_a_stop_sequence_is_named(line: GatewayLine, client: AsyncAnthropic) -> None:
    last = output("a", finish=STOP)
    last.finish.stop_string = "END"
    line.detok.script = DetokScript([last])
    message = await create(client, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_a_tool_loop_of_two_turns(line: GatewayLine, client: AsyncAnthropic) -> None:
    line.detok.script = pieces("Let me look. ", *CALL)
    asked = [{"role": "user", "content": "Rain?"}]
    first = await create(client, messages=asked, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    text, call = first.content
    assert (text.type, call.type, call.name) == ("text", "tool_use", "weather")
    assert call.input == {"city": "Rome"}
    line.detok.script = pieces("It is dry.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "dry"}
    second = await create(
        client,
        tools=[WEATHER],
        messages=[
            *asked,
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        ],
    )
    assert second.content[0].text == "It is dry."
    user, assistant, tool, more = messages_of(line)
    assert user == asked[0] and more == {"role": "user", "content": "Well?"}
    assert assistant["tool_calls"][0]["function"]["name"] == "weather"
    assert tool == {"role": "tool", "tool_call_id": call.id, "content": "dry"}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_can_be_demanded(
    line: GatewayLine, client: AsyncAnthropic, choice: dict[str, Any]
) -> None:
    line.detok.script = pieces(*CALL)
    await create(client, tools=[WEATHER], tool_choice=choice)
    assert line.detok.submitted[-1].record.sampling.HasField("grammar")


class Point(BaseModel):
    x: int
    y: int


async def test_parse_with_a_pydantic_model(line: GatewayLine, client: AsyncAnthropic) -> None:
    line.detok.script = pieces('{"x": 1,', ' "y": 2}')
    message: Any = await client.messages.parse(
        model=MODEL, max_tokens=64, messages=[USER], output_format=Point
    )
    assert message.parsed_output == Point(x=1, y=2)
    grammar = line.detok.submitted[-1].record.sampling.grammar
    assert set(json.loads(grammar.json_schema)["properties"]) == {"x", "y"}


async def test_an_answer_goes_on_with_what_was_begun(
    line: GatewayLine, client: AsyncAnthropic
) -> None:
    await create(client, messages=[USER, {"role": "assistant", "content": "The answer is"}])
    chat = line.tokenizer.encoded[-1].chat
    assert chat.continue_final_message and not chat.add_generation_prompt


async def test_tokens_are_counted_without_answering(
    line: GatewayLine, client: AsyncAnthropic
) -> None:
    counted = await client.messages.count_tokens(
        model=MODEL, messages=[USER], system=[{"type": "text", "text": "Be brief."}]
    )
    assert counted.input_tokens == len("Be brief.hi")
    assert not line.detok.submitted


async def test_errors_have_anthropics_shape(line: GatewayLine, client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await create(client, extra_body={"temperature": 5})
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "temperature" in body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        await create(client, model="other")
    line.tokenizer.error = Overloaded("Too much.")
    with pytest.raises(anthropic.RateLimitError):
        await create(client)


async def test_an_error_in_mid_stream_is_raised_by_the_client(
    line: GatewayLine, client: AsyncAnthropic
) -> None:
    line.detok.script = DetokScript(
        [output("be"), output(error=InternalError("The engine stumbled.", code="engine_fault"))]
    )
    stream = await create(client, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="The engine stumbled"):
        async for _ in stream:
            pass


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 1_000_000}, "max_tokens"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
async def test_bad_bodies_name_the_field(
    line: GatewayLine, fields: dict[str, Any], word: str
) -> None:
    body = {"model": MODEL, "max_tokens": 16, "messages": [USER], **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    response = await line.client.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert word in response.json()["error"]["message"]


async def test_keys_are_anthropics_header(valkey: Valkey, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(entry("ann", "secret"))
    settings: Any = {"api_keys": tmp_path / "keys"}
    async with gateway_line(valkey.url, redis_prefix="keys:", **settings) as running:
        for key, allowed in (("secret", True), ("wrong", False)):
            async with AsyncAnthropic(base_url=running.url, api_key=key, max_retries=0) as client:
                if allowed:
                    assert (await create(client)).type == "message"
                else:
                    with pytest.raises(anthropic.AuthenticationError) as caught:
                        await create(client)
                    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index, call-overload]
