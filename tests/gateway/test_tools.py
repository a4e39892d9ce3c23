"""Tools over HTTP: what is refused, what reaches the line, and calls in answers of both kinds."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2
from tests.fakes.gateway_line import (
    GatewayLine,
    chunks_of,
    events_of,
    eventually,
    gateway_line,
)
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds pages.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "search"}}
USER = {"role": "user", "content": "hi"}
ONE_CALL = [
    "<tool_",
    'call>\n{"name": "search", "argu',
    'ments": {"q": ',
    '"x"}',
    "}\n</tool_call>",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hermes_line(valkey: Valkey) -> AsyncIterator[GatewayLine]:
    async with gateway_line(
        valkey.url, redis_prefix="tools:", tool_call_format="hermes"
    ) as running:
        yield running


@pytest.fixture
def line(hermes_line: GatewayLine) -> GatewayLine:
    hermes_line.reset()
    return hermes_line


def joined_message(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the deltas of one choice."""
    message: dict[str, Any] = {"content": None}
    calls: list[dict[str, Any]] = []
    for delta in (chunk["delta"] for chunk in chunks):
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        message |= {name: delta[name] for name in ("role",) if name in delta}
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append(json.loads(json.dumps(call)))
                assert call["id"].startswith("call_") and call["type"] == "function"
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                function = calls[call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = [without_id(call) for call in calls]
    return message


def without_id(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": call["type"], "function": call["function"]}


def whole_message(choice: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in choice["message"].items() if name != "refusal"}
    if "tool_calls" in message:
        message["tool_calls"] = [without_id(call) for call in message["tool_calls"]]
    return dict(message)


async def both(line: GatewayLine, **fields: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Each choice's message and finish reason, which a stream and a whole answer must share."""
    whole = (await line.chat(**fields)).json()["choices"]
    response = await line.chat(stream=True, **fields)
    messages, reasons = [], []
    for choice in whole:
        chunks = chunks_of(response, choice["index"])
        assert joined_message(chunks) == whole_message(choice)
        found = [chunk["finish_reason"] for chunk in chunks]
        assert found == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
        assert ["role" in chunk["delta"] for chunk in chunks] == [True] + [False] * (
            len(chunks) - 1
        )
        messages.append(whole_message(choice))
        reasons.append(choice["finish_reason"])
    return messages, reasons


async def test_a_call_is_told_whole_and_in_pieces(line: GatewayLine) -> None:
    line.detok.script = pieces("Let me see.\n", *ONE_CALL)
    ((message,), reasons) = await both(line, tools=[SEARCH])
    assert message == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
        ],
    }
    assert reasons == ["tool_calls"]


async def test_content_is_null_beside_calls_alone(line: GatewayLine) -> None:
    line.detok.script = pieces(*ONE_CALL, *ONE_CALL)
    ((message,), _) = await both(line, tools=[SEARCH])
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


async def test_ids_of_calls_differ_and_are_in_the_first_delta_of_each(line: GatewayLine) -> None:
    line.detok.script = pieces(*ONE_CALL, *ONE_CALL)
    calls = (await line.chat(tools=[SEARCH])).json()["choices"][0]["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2


async def test_an_answer_without_calls_is_plain(line: GatewayLine) -> None:
    ((message,), reasons) = await both(line, tools=[SEARCH])
    assert message == {"role": "assistant", "content": "Hello there"}
    assert reasons == ["stop"]
    line.detok.script = DetokScript([output(finish=common_pb2.FINISH_REASON_STOP)])
    ((message,), _) = await both(line, tools=[SEARCH])
    assert message["content"] == ""


async def test_malformed_calls_are_content(line: GatewayLine) -> None:
    text = '<tool_call>{"name": "nobody", "arguments": {}}</tool_call> \n'
    line.detok.script = pieces(*text)
    ((message,), reasons) = await both(line, tools=[SEARCH])
    assert message == {"role": "assistant", "content": text}
    assert reasons == ["stop"]


async def test_text_is_untouched_without_tools_or_with_none(line: GatewayLine) -> None:
    line.detok.script = pieces(*ONE_CALL)
    for fields in ({}, {"tools": []}, {"tools": [SEARCH], "tool_choice": "none"}):
        ((message,), reasons) = await both(line, **fields)
        assert message == {"role": "assistant", "content": "".join(ONE_CALL)}
        assert reasons == ["stop"]
    assert all(not encoded.chat.tools_json for encoded in line.tokenizer.encoded)


async def test_calls_cut_short_finish_by_length(line: GatewayLine) -> None:
    line.detok.script = pieces(*ONE_CALL[:3], finish=common_pb2.FINISH_REASON_LENGTH)
    ((message,), reasons) = await both(line, tools=[SEARCH])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"q": '
    assert reasons == ["length"]


async def test_without_parallel_calls_there_is_at_most_one(line: GatewayLine) -> None:
    line.detok.script = pieces(*ONE_CALL, *ONE_CALL)
    ((message,), _) = await both(line, tools=[SEARCH], parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1


async def test_choices_call_each_for_itself(line: GatewayLine) -> None:
    scripts = [pieces(*ONE_CALL), pieces("No."), pieces("So: ", *ONE_CALL)]
    numbers = iter(range(100))
    line.detok.script = lambda submit: scripts[next(numbers) % 3]
    messages, reasons = await both(line, tools=[SEARCH], n=3)
    assert [message["content"] for message in messages] == [None, "No.", "So:"]
    assert [len(message.get("tool_calls", ())) for message in messages] == [1, 0, 1]
    assert reasons == ["tool_calls", "stop", "tool_calls"]


async def test_logprobs_cover_the_text_of_calls(line: GatewayLine) -> None:
    def logprobs(text: str) -> detok_pb2.TokenLogprobs:
        token = detok_pb2.TokenLogprob(text=text, text_bytes=text.encode(), logprob=-0.5)
        return detok_pb2.TokenLogprobs(token=token)

    line.detok.script = DetokScript(
        [output(text, logprobs=[logprobs(text)]) for text in ONE_CALL]
        + [output(finish=common_pb2.FINISH_REASON_STOP)]
    )
    fields = {"tools": [SEARCH], "logprobs": True}
    whole = (await line.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in whole] == ONE_CALL
    streamed = [
        entry
        for chunk in chunks_of(await line.chat(stream=True, **fields))
        for entry in (chunk["logprobs"] or {}).get("content", ())
    ]
    assert streamed == whole


async def test_the_record_of_a_request_tells_of_calls(line: GatewayLine) -> None:
    line.detok.script = pieces(*ONE_CALL)
    for stream in (False, True):
        response = await line.chat(tools=[SEARCH], stream=stream)
        record = await line.record_when(response.headers["x-request-id"])
        assert record["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_two_turn_tool_loop(line: GatewayLine, stream: bool) -> None:
    """Ask, be asked to call, answer the call, get the answer: as agents do it."""
    line.detok.script = pieces(*ONE_CALL)
    first = await line.chat(messages=[USER], tools=[SEARCH], stream=stream)
    if stream:
        deltas = [chunk["delta"] for chunk in chunks_of(first)]
        (begun,) = [
            call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call
        ]
        call_id = begun["id"]
        (asked,) = joined_message(chunks_of(first))["tool_calls"]
        asked = {"id": call_id, **asked}
    else:
        (asked,) = first.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(asked["function"]["arguments"]) == {"q": "x"}
    line.tokenizer.encoded.clear()
    line.detok.script = pieces("Found ", "it.")
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": asked["id"], "content": "a page"},
    ]
    second = await line.chat(messages=messages, tools=[SEARCH], stream=stream)
    assert json.loads(line.tokenizer.encoded[0].chat.messages_json) == messages
    message = (
        joined_message(chunks_of(second)) if stream else whole_message(second.json()["choices"][0])
    )
    assert message == {"role": "assistant", "content": "Found it."}


async def test_a_demanded_call_is_held_to_by_a_grammar(line: GatewayLine) -> None:
    line.detok.script = pieces(*ONE_CALL)
    _, reasons = await both(line, tools=[SEARCH, CLOCK], tool_choice="required")
    assert reasons == ["tool_calls"]
    grammar = line.detok.submitted[0].record.sampling.grammar.grammar
    assert '{"const":"search"}' in grammar and '{"const":"clock"}' in grammar
    line.detok.submitted.clear()
    await line.chat(tools=[SEARCH, CLOCK], tool_choice=NAMED)
    grammar = line.detok.submitted[0].record.sampling.grammar.grammar
    assert '{"const":"search"}' in grammar and "clock" not in grammar
    assert len(json.loads(line.tokenizer.encoded[-1].chat.tools_json)) == 2


async def test_only_demanded_calls_are_held_to_a_grammar(line: GatewayLine) -> None:
    for choice in (None, "auto", "none"):
        await line.chat(tools=[SEARCH], tool_choice=choice)
    assert not any(submit.record.sampling.HasField("grammar") for submit in line.detok.submitted)


async def test_control_tokens_of_the_format_stay_in_the_text(line: GatewayLine) -> None:
    await line.chat(tools=[SEARCH])
    await line.chat()
    with_tools, without = line.detok.submitted
    assert list(with_tools.shown_control_tokens) == ["<tool_call>", "</tool_call>"]
    assert with_tools.skip_special_tokens
    assert not without.shown_control_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a" * 65}}]},
            "tools[0].function.name",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
        ({"tools": [CLOCK, SEARCH, CLOCK]}, "tools[2].function.name"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": 7}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [CLOCK], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
        (
            {"tools": [CLOCK], "structured_outputs": {"regex": "a+"}},
            "structured_outputs.regex",
        ),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": "f", "arguments": {}},
                            }
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{**USER, "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].type"),
    ],
)
async def test_what_is_wrong_with_tools_is_named(
    line: GatewayLine, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await line.chat(stream=stream, **fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert not line.detok.submitted


async def test_the_format_comes_from_the_tokenizer_service(valkey: Valkey) -> None:
    async with gateway_line(valkey.url, redis_prefix="auto:") as line:
        line.detok.script = pieces('[TOOL_CALLS] [{"name": "clock", "arguments": {}}]')
        message = (await line.chat(tools=[CLOCK])).json()["choices"][0]["message"]
        assert "tool_calls" not in message
        line.tokenizer.tool_call_format = tokenizer_pb2.TOOL_CALL_FORMAT_MISTRAL

        async def calls() -> Any:
            choice = (await line.chat(tools=[CLOCK])).json()["choices"][0]
            return choice["message"].get("tool_calls")

        (call,) = await eventually(calls, lambda found: found is not None)
        assert call["function"] == {"name": "clock", "arguments": "{}"}


async def test_a_demanded_call_needs_no_known_format(valkey: Valkey) -> None:
    async with gateway_line(valkey.url, redis_prefix="no-format:", tool_call_format="none") as line:
        line.detok.script = pieces('{"name": "search", ', '"arguments": {"q": 1}}')
        ((message,), reasons) = await both(line, tools=[SEARCH], tool_choice=NAMED)
        assert message["tool_calls"][0]["function"]["arguments"] == '{"q": 1}'
        assert reasons == ["tool_calls"]


async def test_usage_counts_every_token_of_a_call(line: GatewayLine) -> None:
    line.detok.script = pieces(*ONE_CALL)
    usage = (await line.chat(tools=[SEARCH])).json()["usage"]
    assert usage["completion_tokens"] == len(ONE_CALL) + 1
    response = await line.chat(tools=[SEARCH], stream=True, stream_options={"include_usage": True})
    assert events_of(response)[-1]["usage"] == usage
