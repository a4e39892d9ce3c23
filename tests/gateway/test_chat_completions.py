"""POST /v1/chat/completions: answers, chunks, logprobs, what goes to the tokenizer."""

import json
from typing import Any

import pytest

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from tests.fakes.gateway_line import (
    MODEL,
    GatewayLine,
    chunks_of,
    events_of,
    streamed_text,
    whole_text,
)
from tests.fakes.scripted_detok import DetokScript, output, pieces

pytestmark = pytest.mark.asyncio(loop_scope="module")


STOP = common_pb2.FINISH_REASON_STOP


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


async def test_a_whole_answer_has_openais_shape(line: GatewayLine) -> None:
    response = await line.chat()
    assert response.status_code == 200
    body = response.json()
    request_id = response.headers["x-request-id"]
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": "fp_" + "f" * 12,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_stream_has_openais_shape(line: GatewayLine) -> None:
    response = await line.chat(stream=True)
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    events = events_of(response)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {event["id"] for event in events} == {f"chatcmpl-{response.headers['x-request-id']}"}
    assert all("usage" not in event for event in events)
    first, *_, last = chunks_of(response)
    assert first["delta"]["role"] == "assistant"
    assert (last["index"], last["logprobs"], last["finish_reason"]) == (0, None, "stop")
    assert streamed_text(response) == "Hello there"


async def test_characters_that_some_clients_take_for_line_ends_are_escaped(
    line: GatewayLine,
) -> None:
    text = 'a\u2028b\u2029c\u0085d\r\ne"\\'
    line.detok.script = pieces(text)
    response = await line.chat(stream=True)
    assert streamed_text(response) == text
    assert len(response.text.splitlines()) == 3 * (len(events_of(response)) + 1)


async def test_messages_reach_the_template_with_keys_unknown_to_us(line: GatewayLine) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi", "mood": {"calm": True}},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    await line.chat(messages=messages, tools=tools, chat_template_kwargs={"thinking": False})
    (encoded,) = line.tokenizer.encoded
    assert json.loads(encoded.chat.messages_json) == messages
    assert json.loads(encoded.chat.tools_json) == tools
    assert json.loads(encoded.chat.template_kwargs_json) == {"thinking": False}
    assert encoded.chat.add_generation_prompt


async def test_tool_choice_none_keeps_tools_from_the_template(line: GatewayLine) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    await line.chat(tools=tools, tool_choice="none")
    assert line.tokenizer.encoded[0].chat.tools_json == b""


async def test_everything_a_sequence_needs_is_in_its_record(line: GatewayLine) -> None:
    await line.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-7,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        max_completion_tokens=9,
        stop=["\n", "END"],
        logprobs=True,
        top_logprobs=3,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        cache_salt="tenant",
    )
    (submit,) = line.detok.submitted
    assert list(submit.record.prompt_token_ids) == list(b"hi")
    assert submit.record.sampling == common_pb2.SamplingParameters(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-7,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        max_tokens=9,
        eos_token_ids=[257],
        logprobs=True,
        top_logprobs=3,
    )
    assert list(submit.stop) == ["\n", "END"]
    assert submit.include_stop_str_in_output
    assert not submit.skip_special_tokens
    assert submit.record.cache_salt == "tenant"
    assert submit.engine_address == line.settings.engine[0]


async def test_defaults_ask_for_nothing(line: GatewayLine) -> None:
    await line.chat()
    (submit,) = line.detok.submitted
    sampling = submit.record.sampling
    assert sampling.seed >= 0
    sampling.seed = 0
    assert sampling == common_pb2.SamplingParameters(
        temperature=1.0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_tokens=4096 - 2,
        eos_token_ids=[257],
    )
    assert submit.skip_special_tokens


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_p": 0}, {"temperature": 0.0, "top_p": 1.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": None, "seed": None, "n": None, "stop": None}, {"temperature": 1.0}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"ignore_eos": True}, {"eos_token_ids": []}),
    ],
)
async def test_special_values(
    line: GatewayLine, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert (await line.chat(**fields)).status_code == 200
    sampling = line.detok.submitted[0].record.sampling
    for name, value in expected.items():
        found = getattr(sampling, name)
        assert (list(found) if isinstance(value, list) else found) == value


async def test_choices_have_seeds_of_their_own_that_reproduce(line: GatewayLine) -> None:
    await line.chat(n=3, seed=42)
    seeds = [submit.record.sampling.seed for submit in line.detok.submitted]
    assert seeds[0] == 42
    assert len(set(seeds)) == 3
    line.detok.submitted.clear()
    await line.chat(n=3, seed=42)
    assert [submit.record.sampling.seed for submit in line.detok.submitted] == seeds


async def test_requests_without_a_seed_get_different_ones(line: GatewayLine) -> None:
    await line.chat()
    await line.chat()
    first, second = line.detok.submitted
    assert first.record.sampling.seed != second.record.sampling.seed


async def test_chat_logprobs(line: GatewayLine) -> None:
    logprobs = detok_pb2.TokenLogprobs(
        token=detok_pb2.TokenLogprob(token_id=1, text="\\xf0", text_bytes=b"\xf0", logprob=-0.5),
        top=[
            detok_pb2.TokenLogprob(token_id=2, text="é", text_bytes="é".encode(), logprob=0.0),
            detok_pb2.TokenLogprob(token_id=3, text="z", text_bytes=b"z", logprob=-9999.0),
        ],
    )
    line.detok.script = DetokScript([output("", logprobs=[logprobs]), output("x", finish=STOP)])
    expected = {
        "token": "\\xf0",
        "logprob": -0.5,
        "bytes": [0xF0],
        "top_logprobs": [
            {"token": "é", "logprob": 0.0, "bytes": [0xC3, 0xA9]},
            {"token": "z", "logprob": -9999.0, "bytes": [0x7A]},
        ],
    }
    whole = (await line.chat(logprobs=True, top_logprobs=2)).json()
    assert whole["choices"][0]["logprobs"] == {"content": [expected], "refusal": None}
    streamed = chunks_of(await line.chat(logprobs=True, top_logprobs=2, stream=True))
    found = [
        entry for chunk in streamed if chunk["logprobs"] for entry in chunk["logprobs"]["content"]
    ]
    assert found == [expected]


async def test_an_answer_of_no_tokens_shown_still_has_a_role(line: GatewayLine) -> None:
    line.detok.script = DetokScript([output(finish=STOP)])
    response = await line.chat(stream=True)
    assert [chunk["delta"] for chunk in chunks_of(response)] == [
        {"role": "assistant", "content": ""}
    ]
    assert whole_text(await line.chat()) == ""


async def test_cached_tokens_are_reported_once_per_prompt(line: GatewayLine) -> None:
    line.detok.script = DetokScript(
        [output("a", started=True, num_cached_tokens=1), output(finish=STOP)]
    )
    usage = (await line.chat(n=2)).json()["usage"]
    assert usage["prompt_tokens"] == 2
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage["completion_tokens"] == 4
