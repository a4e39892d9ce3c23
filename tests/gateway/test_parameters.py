"""What each parameter of a body becomes in the record that reaches the line."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2
from tests.fakes.gateway_line import (
    GatewayLine,
    events_of,
    eventually,
    gateway_line,
)
from tests.fakes.scripted_detok import DetokScript, output
from tests.fakes.scripted_tokenizer import EOS_TOKEN_IDS
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 258
ENDPOINTS = ["chat", "complete"]
STOP = common_pb2.FINISH_REASON_STOP


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


async def submitted(line: GatewayLine, endpoint: str, **fields: Any) -> detok_pb2.Submit:
    """What the line was asked for a request that it takes."""
    response = await line.send(endpoint, **fields)
    assert response.status_code == 200, response.text
    return line.detok.submitted[-1]


async def refused(line: GatewayLine, endpoint: str, param: str, **fields: Any) -> str:
    """The message of the 400 that names `param`; nothing reached the line."""
    before = len(line.detok.submitted)
    response = await line.send(endpoint, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert len(line.detok.submitted) == before
    return str(error["message"])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_silent_request_changes_nothing(line: GatewayLine, endpoint: str) -> None:
    submit = await submitted(line, endpoint, seed=7)
    assert submit.record == common_pb2.GenerationRecord(
        prompt_token_ids=b"hi",
        sampling=common_pb2.SamplingParameters(
            temperature=1,
            top_p=1,
            repetition_penalty=1,
            seed=7,
            max_tokens=4094,
            eos_token_ids=EOS_TOKEN_IDS,
        ),
    )
    assert submit.skip_special_tokens and not submit.include_stop_str_in_output


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_p": 0.25}, {"top_p": 0.25}),
        ({"top_p": 0}, {"top_p": 1.0, "temperature": 0.0}),
        ({"top_k": 7}, {"top_k": 7}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.125}, {"min_p": 0.125}),
        ({"seed": -5}, {"seed": -5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"max_tokens": 9, "min_tokens": 4}, {"max_tokens": 9, "min_tokens": 4}),
        ({"ignore_eos": True}, {"eos_token_ids": []}),
        ({"stop_token_ids": [5, 3, 5]}, {"stop_token_ids": [3, 5]}),
        ({"stop_token_ids": []}, {"stop_token_ids": []}),
        ({"allowed_token_ids": [9, 1, 9]}, {"allowed_token_ids": [1, 9]}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": True, "top_prompt_logprobs": 0}),
        ({"prompt_logprobs": 20}, {"prompt_logprobs": True, "top_prompt_logprobs": 20}),
    ],
)
async def test_sampling_parameters_reach_the_engine(
    line: GatewayLine, endpoint: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    sampling = (await submitted(line, endpoint, **fields)).record.sampling
    found = {name: getattr(sampling, name) for name in expected}
    assert {
        name: value if isinstance(value, int | float) else list(value)
        for name, value in found.items()
    } == expected


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"stop": "a" * 1024}, {"stop": ["a" * 1024]}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ],
)
async def test_text_parameters_reach_the_detokenizer(
    line: GatewayLine, endpoint: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    submit = await submitted(line, endpoint, **fields)
    for name, value in expected.items():
        found = getattr(submit, name)
        assert (found if isinstance(found, bool) else list(found)) == value


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_lower_priority_value_runs_first(line: GatewayLine, endpoint: str) -> None:
    assert (await submitted(line, endpoint, priority=-3)).record.priority == 3
    assert (await submitted(line, endpoint, priority=7)).record.priority == -7
    assert (await submitted(line, endpoint, cache_salt="s")).record.cache_salt == "s"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_bug_45_biases_outside_the_models_vocabulary_or_range_are_refused(
    line: GatewayLine, endpoint: str
) -> None:
    reference = (await line.send(endpoint, seed=1)).json()["choices"]
    bad: list[Any] = [
        *({str(VOCAB_SIZE): 5}, {"-1": 5}, {"abc": 5}, {"5": 101}, {"5": "x"}),
        *({"5": -100.5}, {"5": True}, {"5": None}, {"5": [1]}, {"": 1}, {"1.0": 1}, {"٣": 1}),
        *({"9" * 5000: 1}, {str(index): 1 for index in range(1025)}, {" 1": 1}),
    ]
    for biases in bad:
        message = await refused(line, endpoint, "logit_bias", logit_bias=biases)
        assert len(message) < 300
        assert (await line.send(endpoint, seed=1)).json()["choices"] == reference
    for biases in ({}, {str(VOCAB_SIZE - 1): -100}, {"0": 100, "3": 0.5}):
        sampling = (await submitted(line, endpoint, logit_bias=biases)).record.sampling
        assert {str(entry.token_id): entry.bias for entry in sampling.logit_bias} == biases


async def test_bad_words_are_banned_with_and_without_a_leading_blank(line: GatewayLine) -> None:
    # The scripted tokenizer writes a blank as a token of its own: the plain form bans both.
    sampling = (await submitted(line, "chat", bad_words=["ab", " c"])).record.sampling
    assert [bytes(word.token_ids) for word in sampling.bad_words] == [b"ab", b"c"]
    texts = [request.text for request in line.tokenizer.encoded if request.HasField("text")]
    assert sorted(text.text for text in texts) == [" ab", " c", "ab", "c"]
    assert not any(text.add_special_tokens for text in texts)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
        ("stop_token_ids", {"stop_token_ids": [1] * 1025}),
        ("allowed_token_ids", {"allowed_token_ids": [1] * (VOCAB_SIZE + 1)}),
        ("stop", {"stop": "x" * 1025}),
        ("stop[1]", {"stop": ["x" * 1024, "x" * 1025]}),
        ("guided_choice", {"guided_choice": ["x" * (1 << 17), "y"]}),
        ("guided_regex", {"guided_regex": " " * (1 << 20)}),
        ("stop_token_ids[0]", {"stop_token_ids": [-1]}),
        ("stop_token_ids", {"stop_token_ids": 5}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        ("min_tokens", {"min_tokens": 5000}),
        ("logit_bias", {"logit_bias": []}),
        ("bad_words", {"bad_words": "x"}),
        ("bad_words", {"bad_words": ["x"] * 129}),
        ("bad_words[1]", {"bad_words": ["x", "  "]}),
        ("bad_words[0]", {"bad_words": ["x" * 257]}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids", {"allowed_token_ids": [1, VOCAB_SIZE]}),
        ("allowed_token_ids[0]", {"allowed_token_ids": ["a"]}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 0, "stream": True}),
        ("priority", {"priority": 1 << 31}),
        ("priority", {"priority": 0.5}),
        ("timeout", {"timeout": 0}),
        ("timeout", {"timeout": -1}),
        ("timeout", {"timeout": 86_401}),
        ("timeout", {"timeout": "soon"}),
        ("cache_salt", {"cache_salt": "x" * 1025}),
        ("ignore_eos", {"ignore_eos": 1}),
        ("user", {"user": 5}),
        ("metadata", {"metadata": "x"}),
        ("metadata", {"metadata": {str(index): "" for index in range(17)}}),
        ("metadata", {"metadata": {"k" * 65: ""}}),
        ("metadata", {"metadata": {"k": "v" * 513}}),
        ("metadata", {"metadata": {"k": 1}}),
    ],
)
async def test_what_is_out_of_range_is_refused_and_named(
    line: GatewayLine, endpoint: str, param: str, fields: dict[str, Any]
) -> None:
    assert await refused(line, endpoint, param, **fields)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_user_and_metadata_have_no_effect(line: GatewayLine, endpoint: str) -> None:
    plain = await submitted(line, endpoint, seed=1)
    metadata = {f"{index:064}": "v" * 512 for index in range(16)}
    marked = await submitted(line, endpoint, seed=1, user="u", metadata=metadata)
    assert marked.record == plain.record


async def test_a_chat_says_how_its_prompt_ends(line: GatewayLine) -> None:
    for fields, expected in [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"add_generation_prompt": True, "continue_final_message": False}, (True, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (False, True)),
    ]:
        await submitted(line, "chat", **fields)
        chat = line.tokenizer.encoded[-1].chat
        assert (chat.add_generation_prompt, chat.continue_final_message) == expected
    await refused(
        line,
        "chat",
        "continue_final_message",
        continue_final_message=True,
        add_generation_prompt=True,
    )


async def test_template_variables_reach_the_template(line: GatewayLine) -> None:
    await submitted(line, "chat", chat_template_kwargs={"enable_thinking": False})
    assert line.tokenizer.encoded[-1].chat.template_kwargs_json == b'{"enable_thinking":false}'
    await refused(line, "chat", "chat_template", chat_template="{{ 1 }}")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_usage_in_every_chunk_grows_to_the_whole(line: GatewayLine, endpoint: str) -> None:
    line.detok.script = DetokScript(
        [output("a", started=True), output("bcd", num_tokens=3), output(finish=STOP)]
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await line.send(endpoint, n=2, stream=True, stream_options=options)
    events = events_of(response)
    usages = [event["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] >= 1 and counts[-1] == 10
    assert all(usage["prompt_tokens"] == 2 for usage in usages)
    assert all(usage["total_tokens"] == 2 + usage["completion_tokens"] for usage in usages)
    assert events[-1]["choices"] == []
    # As in vLLM it asks for nothing where usage itself was not asked for.
    options = {"continuous_usage_stats": True}
    response = await line.send(endpoint, stream=True, stream_options=options)
    assert all("usage" not in event for event in events_of(response))


@pytest.fixture
async def opinionated(valkey: Valkey, redis_prefix: str) -> AsyncIterator[GatewayLine]:
    """A line whose model has a generation config."""
    defaults = tokenizer_pb2.GenerationDefaults(
        temperature=0.5, top_p=0.75, top_k=20, min_p=0.25, repetition_penalty=1.5, max_new_tokens=64
    )
    async with gateway_line(valkey.url, redis_prefix=redis_prefix) as running:
        running.tokenizer.defaults.CopyFrom(defaults)

        async def has_heard_of_them() -> float:
            await running.complete(temperature=None)
            return running.detok.submitted[-1].record.sampling.temperature

        await eventually(has_heard_of_them, lambda temperature: math.isclose(temperature, 0.5))
        yield running


@pytest.mark.asyncio(loop_scope="function")
async def test_a_models_generation_config_speaks_where_the_request_is_silent(
    opinionated: GatewayLine,
) -> None:
    sampling = (await submitted(opinionated, "chat")).record.sampling
    assert sampling.temperature == 0.5
    assert sampling.top_p == 0.75
    assert sampling.top_k == 20
    assert sampling.min_p == 0.25
    assert sampling.repetition_penalty == 1.5
    assert sampling.max_tokens == 64
    sampling = (
        await submitted(
            opinionated,
            "complete",
            temperature=0,
            top_p=1,
            top_k=0,
            min_p=0,
            repetition_penalty=1,
            max_tokens=100,
        )
    ).record.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 0, 0)
    assert (sampling.repetition_penalty, sampling.max_tokens) == (1, 100)
    # What the prompt leaves is less than the model's own limit.
    sampling = (await submitted(opinionated, "complete", prompt="x" * 4090)).record.sampling
    assert sampling.max_tokens == 6
