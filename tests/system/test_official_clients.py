"""What the official Python clients ask of a real line; none of them is patched.

| asked of the line    | here, by openai or anthropic              | by npm's openai             |
|----------------------|-------------------------------------------|-----------------------------|
| chat                 | test_a_chat                               | chat                        |
| streams              | test_a_streamed_chat_is_the_whole_one     | chat_streamed               |
| completions          | test_completions_whole_and_streamed       | completions                 |
| parse()              | test_an_answer_of_a_pydantic_model (*)    | parse                       |
| tool loop, two turns | test_a_two_turn_tool_loop[False] (*)      | tool_loop                   |
| the same, streamed   | test_a_two_turn_tool_loop[True] (*)       | tool_loop_streamed          |
| logprobs             | test_log_probabilities_cover_every_byte   | logprobs                    |
| n=3                  | test_three_choices_are_the_same_streamed  | three_choices               |
| Responses: streamed, | test_a_streamed_response_is_retrieved_by_ | response_by_another_gateway |
| retrieved elsewhere  |   the_other_gateway                       |                             |
| Responses: parse()   | test_a_response_of_a_pydantic_model       | response_parse              |
| Responses: tool loop | test_a_response_calls_a_tool_and_goes_on  | response_tool_loop          |
| errors, models       | test_errors_are_of_the_clients_types      | errors                      |
| messages             | test_a_message, test_tokens_are_counted   |                             |
| messages, streamed   | test_a_streamed_message_is_the_whole_one  |                             |
| messages, tool loop  | test_a_tool_loop_of_messages              |                             |

(*) in test_tools_and_structure.py. The last column: clients/openai_client.mjs, which is run by
test_official_clients_node.py. What a real model does not show at will (thoughts, errors in
mid-stream, background responses) the same clients see in tests/gateway/test_responses.py,
test_responses_background.py and test_messages.py.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from tests.fakes.running_line import RunningLine

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = {"role": "user", "content": "What is the capital of Germany?"}
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


class Answer(pydantic.BaseModel):
    mood: Literal["sunny", "rainy"]
    degrees: int = pydantic.Field(ge=-9, le=9)


@pytest.fixture(scope="module")
def clients(line: RunningLine) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """A client of each of the two gateways."""
    first, second = line.state.gateway_urls
    with (
        openai.OpenAI(base_url=f"{first}/v1", api_key="none", max_retries=0) as one,
        openai.OpenAI(base_url=f"{second}/v1", api_key="none", max_retries=0) as other,
    ):
        yield one, other


@pytest.fixture(scope="module")
def client(clients: tuple[openai.OpenAI, openai.OpenAI]) -> openai.OpenAI:
    return clients[0]


@pytest.fixture(scope="module")
def messages_client(line: RunningLine) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=line.url, api_key="none", max_retries=0) as client:
        yield client


def valid(model: Any) -> Any:
    """`model`, which must be what its type says: the clients build their types unchecked."""
    type(model).model_validate(model.to_dict(warnings=False))
    return model


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"messages": [QUESTION], "temperature": 0, "max_tokens": 16, **fields}
    return client.chat.completions.create(model=MODEL, **body)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, **fields}
    return client.completions.create(model=MODEL, **body)


def test_a_chat(client: openai.OpenAI) -> None:
    completion = valid(chat(client, messages=[{"role": "developer", "content": "Hi."}, QUESTION]))
    assert completion.id.startswith("chatcmpl-")
    assert (completion.object, completion.model) == ("chat.completion", MODEL)
    (choice,) = completion.choices
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.role == "assistant" and "Berlin" in choice.message.content
    usage = completion.usage
    assert 0 < usage.completion_tokens <= 16
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = chat(client)
    options = {"include_usage": True}
    chunks = [valid(chunk) for chunk in chat(client, stream=True, stream_options=options)]
    *told, last = chunks
    assert last.choices == [] and last.usage.to_dict().items() >= {
        ("completion_tokens", whole.usage.completion_tokens),
        ("prompt_tokens", whole.usage.prompt_tokens),
    }
    assert all(chunk.usage is None for chunk in told)
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in told]
    assert deltas[0].role == "assistant" and len(deltas) > 3
    content = "".join(delta.content or "" for delta in deltas)
    assert content == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in told]
    assert reasons == [None] * (len(told) - 1) + [whole.choices[0].finish_reason]


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = valid(complete(client, logprobs=2))
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and whole.usage.completion_tokens == 12
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.token_logprobs) == 12
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "length"
    echoed = complete(client, prompt=["One", "Two"], echo=True, max_tokens=2)
    assert [choice.index for choice in echoed.choices] == [0, 1]
    assert echoed.choices[1].text.startswith("Two")


def test_log_probabilities_cover_every_byte(client: openai.OpenAI) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6}
    (choice,) = valid(chat(client, **asked)).choices
    entries = choice.logprobs.content
    assert (
        bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content
    )
    for entry in entries:
        best = entry.top_logprobs
        assert len(best) == 3 and 0 >= best[0].logprob >= best[1].logprob >= best[2].logprob
        # Greedy: what was sampled is the likeliest.
        assert (entry.token, entry.logprob) == (best[0].token, best[0].logprob)
    streamed = [
        entry
        for chunk in chat(client, stream=True, **asked)
        if chunk.choices and valid(chunk).choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.to_dict() for entry in streamed] == [entry.to_dict() for entry in entries]


def test_three_choices_are_the_same_streamed(client: openai.OpenAI) -> None:
    asked = {"n": 3, "seed": 7, "temperature": 1.2}
    whole = valid(chat(client, **asked))
    contents = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(contents)) == 3
    streamed = ["", "", ""]
    for chunk in chat(client, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == contents


def test_errors_are_of_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, temperature=3)
    assert refused.value.param == "temperature" and refused.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=[QUESTION])
    assert unknown.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_streamed_response_is_retrieved_by_the_other_gateway(
    clients: tuple[openai.OpenAI, openai.OpenAI],
) -> None:
    one, other = clients
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    with one.responses.stream(input="What is the capital of Germany?", **asked) as stream:
        events = [EVENT.validate_python(event.to_dict(warnings=False)) for event in stream]
        final: Any = valid(stream.get_final_response())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == final.output_text
    assert "Berlin" in final.output_text

    found = valid(other.responses.retrieve(final.id))
    assert found.output_text == final.output_text and found.usage == final.usage
    items = other.responses.input_items.list(final.id)
    assert [item.type for item in items] == ["message"]
    more = other.responses.create(input="And of Italy?", previous_response_id=final.id, **asked)
    assert valid(more).usage.input_tokens > final.usage.input_tokens + final.usage.output_tokens
    assert more.previous_response_id == final.id
    other.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(final.id)


def test_a_response_of_a_pydantic_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL, input="The weather?", text_format=Answer, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, Answer)


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_calls_a_tool_and_goes_on(client: openai.OpenAI, streams: bool) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    fields: Any = {"model": MODEL, "tools": [tool], "temperature": 0}

    def ask(**more: Any) -> Any:
        if not streams:
            return valid(client.responses.create(**fields, **more))
        # Not `responses.stream`, which raises where an answer is cut short.
        [*_, last] = client.responses.create(stream=True, **fields, **more)
        return valid(last).response

    named = {"type": "function", "name": "get_weather"}
    asked = ask(input="The weather in Paris?", tool_choice=named, max_output_tokens=40)
    (call,) = asked.output
    assert call.type == "function_call" and json.loads(call.arguments).keys() == {"city"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more: Any = {"previous_response_id": asked.id, "tool_choice": "none", "max_output_tokens": 8}
    answered = ask(input=[result], **more)
    assert answered.output_text


def message(client: anthropic.Anthropic, **fields: Any) -> Any:
    greedy = {"temperature": 0, **fields.pop("extra_body", {})}
    body = {"max_tokens": 16, "messages": [QUESTION], "extra_body": greedy, **fields}
    return client.messages.create(model=MODEL, **body)


def test_a_message(messages_client: anthropic.Anthropic) -> None:
    answer = valid(message(messages_client, system="Be brief."))
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    (block,) = answer.content
    assert block.type == "text" and "Berlin" in block.text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert 0 < answer.usage.output_tokens <= 16
    with pytest.raises(anthropic.NotFoundError):
        messages_client.messages.create(model="other", max_tokens=1, messages=[QUESTION])


def test_a_streamed_message_is_the_whole_one(messages_client: anthropic.Anthropic) -> None:
    whole = message(messages_client)
    with messages_client.messages.stream(
        model=MODEL, max_tokens=16, messages=[QUESTION], extra_body={"temperature": 0}
    ) as stream:
        texts = list(stream.text_stream)
        final = valid(stream.get_final_message())
    assert len(texts) > 3 and "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_loop_of_messages(messages_client: anthropic.Anthropic, streams: bool) -> None:
    tool = {"name": "get_weather", "description": "The weather now.", "input_schema": SCHEMA}

    def ask(messages: list[Any], **more: Any) -> Any:
        fields: Any = {"model": MODEL, "tools": [tool], "messages": messages, **more}
        if not streams:
            return valid(messages_client.messages.create(**fields))
        with messages_client.messages.stream(**fields) as stream:
            return valid(stream.get_final_message())

    named = {"type": "tool", "name": "get_weather"}
    asked = ask([QUESTION], tool_choice=named, max_tokens=40)
    assert asked.stop_reason == "tool_use"
    call = asked.content[-1]
    assert call.type == "tool_use" and call.name == "get_weather"
    assert call.input.keys() == {"city"}
    answer = {"role": "assistant", "content": [block.to_dict() for block in asked.content]}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [QUESTION, answer, {"role": "user", "content": [result]}]
    answered = ask(turns, tool_choice={"type": "none"}, max_tokens=8)
    assert answered.content[0].text


def test_tokens_are_counted(messages_client: anthropic.Anthropic) -> None:
    counted = messages_client.messages.count_tokens(model=MODEL, messages=[QUESTION])
    usage = message(messages_client).usage
    # Anthropic counts what the prefix cache held apart.
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
