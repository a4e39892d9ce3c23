"""POST /v1/completions: prompts of every kind, answers, chunks, logprobs in the legacy format."""

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


def by_prompt(submit: detok_pb2.Submit) -> DetokScript:
    """Says its prompt and whether its seed is the request's own."""
    prompt = bytes(submit.record.prompt_token_ids).decode()
    return pieces(prompt, "!")


async def test_a_whole_answer_has_openais_shape(line: GatewayLine) -> None:
    response = await line.complete(max_tokens=5)
    body = response.json()
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": f"cmpl-{response.headers['x-request-id']}",
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": "fp_" + "f" * 12,
        "choices": [{"index": 0, "text": "Hello there", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert line.detok.submitted[0].record.sampling.max_tokens == 5


async def test_a_stream_has_openais_shape(line: GatewayLine) -> None:
    response = await line.complete(stream=True)
    assert {event["object"] for event in events_of(response)} == {"text_completion"}
    assert streamed_text(response) == "Hello there"
    last = chunks_of(response)[-1]
    assert set(last) == {"index", "text", "logprobs", "finish_reason"}
    assert (last["index"], last["logprobs"], last["finish_reason"]) == (0, None, "stop")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab"], [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_every_kind_and_their_choice_indices(
    line: GatewayLine, prompt: Any, expected: list[bytes], stream: bool
) -> None:
    line.detok.script = by_prompt
    response = await line.complete(prompt=prompt, n=2, stream=stream)
    for prompt_index, ids in enumerate(expected):
        for choice in range(2):
            index = prompt_index * 2 + choice
            text = streamed_text(response, index) if stream else whole_text(response, index)
            assert text == ids.decode() + "!"
    seeds = [submit.record.sampling.seed for submit in line.detok.submitted]
    assert len(set(seeds)) == len(seeds)
    if not stream:
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == sum(map(len, expected))
        assert usage["completion_tokens"] == len(expected) * 2 * 3


async def test_text_prompts_get_the_tokenizers_own_additions(line: GatewayLine) -> None:
    await line.complete(prompt="<s>x")
    assert line.tokenizer.encoded[0].text.text == "<s>x"
    assert line.tokenizer.encoded[0].text.add_special_tokens


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 1], [[1], "a"], [-1], [[258]], [1.5], {}, None, [None], ""]
)
async def test_bad_prompts_are_named(line: GatewayLine, prompt: Any) -> None:
    response = await line.complete(prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")
    assert not line.detok.submitted


def token(text: str, logprob: float = -1.0, raw: bytes | None = None) -> detok_pb2.TokenLogprob:
    return detok_pb2.TokenLogprob(
        text=text, text_bytes=text.encode() if raw is None else raw, logprob=logprob
    )


@pytest.fixture
def with_logprobs(line: GatewayLine) -> GatewayLine:
    entries = [
        detok_pb2.TokenLogprobs(token=token("a"), top=[token("b", -0.5), token("a")]),
        detok_pb2.TokenLogprobs(token=token("\\xc3", raw=b"\xc3"), top=[token("b", -0.25)]),
        detok_pb2.TokenLogprobs(token=token("\\xa9z", raw=b"\xa9z"), top=[token("b", -0.125)]),
        detok_pb2.TokenLogprobs(token=token("c"), top=[token("c")]),
    ]
    line.detok.script = DetokScript(
        [
            output("a", logprobs=entries[:1]),
            output("", logprobs=entries[1:2]),
            output("éz", logprobs=entries[2:3]),
            output("c", logprobs=entries[3:]),
            output(finish=STOP),
        ]
    )
    return line


async def test_legacy_logprobs(with_logprobs: GatewayLine) -> None:
    response = await with_logprobs.complete(logprobs=2)
    assert response.json()["choices"][0]["logprobs"] == {
        "tokens": ["a", "\\xc3", "\\xa9z", "c"],
        "token_logprobs": [-1.0] * 4,
        "top_logprobs": [
            {"b": -0.5, "a": -1.0},
            {"b": -0.25, "\\xc3": -1.0},
            {"b": -0.125, "\\xa9z": -1.0},
            {"c": -1.0},
        ],
        # Where each token's first character begins in "aézc".
        "text_offset": [0, 1, 1, 3],
    }


async def test_streamed_legacy_logprobs_are_the_whole_ones(with_logprobs: GatewayLine) -> None:
    whole = (await with_logprobs.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    chunks = chunks_of(await with_logprobs.complete(logprobs=2, stream=True))
    for name, values in whole.items():
        found = [
            value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]
        ]
        assert found == values


async def test_logprobs_zero_asks_for_the_sampled_tokens_only(line: GatewayLine) -> None:
    entry = detok_pb2.TokenLogprobs(token=token("a"))
    line.detok.script = DetokScript([output("a", logprobs=[entry]), output(finish=STOP)])
    logprobs = (await line.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-1.0]
    assert logprobs["top_logprobs"] == [None]
    sampling = line.detok.submitted[0].record.sampling
    assert sampling.logprobs and sampling.top_logprobs == 0
