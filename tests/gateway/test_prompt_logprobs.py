"""prompt_logprobs in the form of vLLM, on both endpoints."""

from typing import Any

import pytest

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from tests.fakes.gateway_line import GatewayLine
from tests.fakes.scripted_detok import DetokScript, output

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    module_line.detok.script = answering
    return module_line


def token(token_id: int, logprob: float) -> detok_pb2.TokenLogprob:
    return detok_pb2.TokenLogprob(
        token_id=token_id, text=chr(token_id), text_bytes=bytes([token_id]), logprob=logprob
    )


def answering(submit: detok_pb2.Submit) -> DetokScript:
    first, *rest = submit.record.prompt_token_ids
    made = output("!", finish=common_pb2.FINISH_REASON_STOP)
    if submit.record.sampling.prompt_logprobs:
        likeliest = [token(120, -0.5), token(105, -1.0), token(121, -9999.0)]
        top = likeliest[: submit.record.sampling.top_prompt_logprobs]
        made.prompt_logprobs.append(detok_pb2.TokenLogprobs(token=token(first, 0.0)))
        made.prompt_logprobs.extend(
            detok_pb2.TokenLogprobs(token=token(token_id, -1.0), top=top) for token_id in rest
        )
    return DetokScript([made])


def listed(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": chr(token_id)},
    }


@pytest.mark.parametrize(
    ("num_top", "expected"),
    [
        (0, listed(105, -1.0, None)),
        (1, {**listed(105, -1.0, None), **listed(120, -0.5, 1)}),
        (
            3,
            {**listed(105, -1.0, 2), **listed(120, -0.5, 1), **listed(121, -9999.0, 3)},
        ),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_every_token_has_its_own_and_the_likeliest(
    line: GatewayLine, endpoint: str, num_top: int, expected: dict[str, Any]
) -> None:
    body = (await line.send(endpoint, prompt_logprobs=num_top)).json()
    place = body if endpoint == "chat" else body["choices"][0]
    assert place["prompt_logprobs"] == [None, expected]


async def test_each_choice_of_each_prompt_has_its_own(line: GatewayLine) -> None:
    body = (await line.complete(prompt=["a", "bcd"], n=2, prompt_logprobs=0)).json()
    assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [1, 1, 3, 3]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_they_are_left_out_where_nobody_asks(line: GatewayLine, endpoint: str) -> None:
    body = (await line.send(endpoint)).json()
    assert "prompt_logprobs" not in body
    assert "prompt_logprobs" not in body["choices"][0]


async def test_with_echo_each_form_has_as_many_likeliest_as_it_asked_for(line: GatewayLine) -> None:
    body = (await line.complete(echo=True, logprobs=1, prompt_logprobs=3)).json()
    (choice,) = body["choices"]
    assert len(choice["prompt_logprobs"][1]) == 3
    assert choice["logprobs"]["top_logprobs"][1] == {"x": -0.5, "i": -1.0}
