"""best_of draws more choices than it returns, and returns the likeliest."""

import pytest

from gateway.job import choice_seed
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from tests.fakes.gateway_line import GatewayLine, streamed_text
from tests.fakes.scripted_detok import DetokScript, output

pytestmark = pytest.mark.asyncio(loop_scope="module")

STOP = common_pb2.FINISH_REASON_STOP
SEED = 11
# By choice index: the log-probability of each of its tokens.
LOGPROBS = [[-1.0, -1.0], [-0.5, -0.75, -0.25], [-3.0], [], [-0.5, -2.0]]


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    module_line.detok.script = by_seed
    return module_line


def by_seed(submit: detok_pb2.Submit) -> DetokScript:
    """Choice i of prompt p says `p:i`, once for each of its tokens."""
    seeds = [choice_seed(SEED, index) for index in range(2 * len(LOGPROBS))]
    prompt = bytes(submit.record.prompt_token_ids).decode()
    index = seeds.index(submit.record.sampling.seed) % len(LOGPROBS)
    outputs = [
        output(
            f"{prompt}:{index} ",
            logprobs=[
                detok_pb2.TokenLogprobs(token=detok_pb2.TokenLogprob(text="t", logprob=logprob))
            ],
        )
        for logprob in LOGPROBS[index]
    ]
    return DetokScript([*outputs, output(finish=STOP)])


async def test_the_best_by_mean_log_probability_are_returned_in_order(line: GatewayLine) -> None:
    response = await line.complete(prompt="p", seed=SEED, n=3, best_of=5)
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["text"].split()[0] for choice in choices] == ["p:1", "p:0", "p:4"]
    assert all(choice["logprobs"] is None for choice in choices)
    # Every token that was sampled counts, returned or not.
    usage = response.json()["usage"]
    assert usage["completion_tokens"] == sum(len(logprobs) + 1 for logprobs in LOGPROBS)
    assert all(submit.record.sampling.logprobs for submit in line.detok.submitted)


async def test_the_choices_are_those_of_n(line: GatewayLine) -> None:
    await line.complete(seed=SEED, n=5)
    seeds = [submit.record.sampling.seed for submit in line.detok.submitted]
    line.detok.submitted.clear()
    await line.complete(seed=SEED, best_of=5)
    assert [submit.record.sampling.seed for submit in line.detok.submitted] == seeds


async def test_each_prompt_has_its_own_best(line: GatewayLine) -> None:
    response = await line.complete(prompt=["p", "q"], seed=SEED, n=2, best_of=5, logprobs=0)
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    texts = [choice["text"].split()[0] for choice in choices]
    assert texts == ["p:1", "p:0", "q:1", "q:0"]
    assert choices[0]["logprobs"]["token_logprobs"] == [-0.5, -0.75, -0.25]


async def test_as_many_as_n_are_all_returned_and_may_be_streamed(line: GatewayLine) -> None:
    whole = (await line.complete(prompt="p", seed=SEED, n=2, best_of=2)).json()["choices"]
    assert [choice["text"].split()[0] for choice in whole] == ["p:0", "p:1"]
    response = await line.complete(prompt="p", seed=SEED, n=2, best_of=2, stream=True)
    assert streamed_text(response, 1) == whole[1]["text"]
    assert not line.detok.submitted[-1].record.sampling.logprobs


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "best_of": 1},
        {"n": 1, "best_of": 2, "stream": True},
        {"best_of": 0},
        {"best_of": 129},
    ],
)
async def test_what_cannot_be_is_refused(line: GatewayLine, fields: dict[str, object]) -> None:
    response = await line.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"


async def test_prompts_times_best_of_are_bounded(line: GatewayLine) -> None:
    response = await line.complete(prompt=["p"] * 9, best_of=128)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
