"""Tools and structured output on a real line, as the official Python client asks for them."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.fakes.running_line import RunningLine

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 24},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}


class Answer(pydantic.BaseModel):
    mood: Literal["sunny", "rainy"]
    degrees: int = pydantic.Field(ge=-9, le=9)


@pytest.fixture(scope="module")
def client(line: RunningLine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{line.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streams", [False, True])
def test_a_two_turn_tool_loop(client: openai.OpenAI, streams: bool) -> None:
    fields: Any = {"model": MODEL, "tools": [WEATHER], "seed": 5, "max_tokens": 100}

    def ask(messages: list[Any], **more: Any) -> Any:
        if not streams:
            return client.chat.completions.create(messages=messages, **fields, **more).choices[0]
        with client.chat.completions.stream(messages=messages, **fields, **more) as stream:
            return stream.get_final_completion().choices[0]

    asked = ask([QUESTION], tool_choice=NAMED)
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
    message = asked.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
    answered = ask([QUESTION, message, result], tool_choice="none", stop=["."])
    assert answered.message.content
    assert not answered.message.tool_calls


def test_streamed_calls_are_the_whole_ones_for_every_choice(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": MODEL,
        "messages": [QUESTION],
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "n": 3,
        "seed": 11,
        "max_tokens": 100,
    }
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion()
    assert len(whole.choices) == 3
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        (call,), (same,) = one.message.tool_calls or (), other.message.tool_calls or ()
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        assert call.function.name == same.function.name == "get_weather"
        assert call.function.arguments == same.function.arguments
        assert one.finish_reason == other.finish_reason == "tool_calls"


def test_an_answer_of_a_pydantic_model(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=[QUESTION], response_format=Answer, seed=3, max_tokens=60
    )
    assert isinstance(completion.choices[0].message.parsed, Answer)


def test_a_schema_that_cannot_be_kept_to_is_400_and_names_the_keyword(
    client: openai.OpenAI,
) -> None:
    schema = {"type": "array", "contains": {"type": "string"}}
    format_: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[QUESTION], response_format=format_)
    assert "contains" in str(caught.value)
    assert caught.value.param == "response_format.json_schema.schema"
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=[QUESTION],
            tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
            tool_choice="required",
        )
    assert "contains" in str(caught.value)
    assert caught.value.param == "tools"
