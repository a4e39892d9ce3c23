"""Prompts and answers that do not fit the model's context: KNOWN_FAULTS 48."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.prompt_size import max_prompt_bytes
from tests.fakes.gateway_line import MODEL, GatewayLine, gateway_line
from tests.fakes.valkey import Valkey

LIMIT = 128
HUGE = "x" * (max_prompt_bytes(LIMIT) + 1)


@pytest.fixture
async def small(valkey: Valkey, redis_prefix: str) -> AsyncIterator[GatewayLine]:
    async with gateway_line(valkey.url, redis_prefix=redis_prefix, max_model_len=LIMIT) as running:
        yield running


async def send(line: GatewayLine, endpoint: str, num_prompt_tokens: int, **fields: Any) -> Any:
    text = "x" * num_prompt_tokens
    if endpoint == "chat":
        return await line.chat(messages=[{"role": "user", "content": text}], **fields)
    return await line.complete(prompt=text, **fields)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "counts"),
    [(130, None, ["130"]), (128, None, ["128"]), (100, 100, ["200", "100", "at most 28"])],
)
async def test_bug_48_too_long_is_400_with_the_real_limit_and_counts(
    small: GatewayLine,
    endpoint: str,
    stream: bool,
    num_prompt_tokens: int,
    max_tokens: int | None,
    counts: list[str],
) -> None:
    response = await send(small, endpoint, num_prompt_tokens, max_tokens=max_tokens, stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    if max_tokens is None:
        assert error["param"] == ("messages" if endpoint == "chat" else "prompt")
    else:
        assert error["param"] == "max_tokens"
    for text in ["maximum context length is 128 tokens", *counts]:
        assert text in error["message"]
    assert not small.detok.submitted
    record = await small.record(response.headers["x-request-id"])
    assert (record["state"], record["finish_reason"]) == ("finished", "error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": HUGE}]}),
        ("/v1/completions", "prompt", {"prompt": HUGE}),
        ("/v1/completions", "prompt", {"prompt": ["x", HUGE]}),
        ("/v1/responses", "input", {"input": HUGE}),
        ("/tokenize", "prompt", {"prompt": HUGE}),
        ("/tokenize", "messages", {"messages": [{"role": "user", "content": HUGE}]}),
    ],
)
async def test_a_prompt_that_cannot_fit_is_refused_without_encoding_it(
    small: GatewayLine, path: str, param: str, fields: dict[str, Any], stream: bool
) -> None:
    response = await small.client.post(path, json={"model": MODEL, "stream": stream, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 128 tokens" in error["message"]
    assert "bytes" in error["message"]
    assert not small.tokenizer.encoded


async def test_too_many_tokens_are_refused_as_such(small: GatewayLine) -> None:
    response = await small.complete(prompt=[1] * 200_000)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "200000 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_bug_48_one_token_of_room_is_used(small: GatewayLine, endpoint: str) -> None:
    assert (await send(small, endpoint, 127)).status_code == 200
    assert (await send(small, endpoint, 100, max_tokens=28)).status_code == 200
    limits = [submit.record.sampling.max_tokens for submit in small.detok.submitted]
    assert limits == [1, 28]


async def test_a_prompt_that_does_not_fit_stops_its_whole_request(small: GatewayLine) -> None:
    response = await small.complete(prompt=["x", "x" * 128])
    assert response.status_code == 400
    assert not small.detok.submitted
