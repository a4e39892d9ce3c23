"""A sequence that goes on from its record gives the ids and log-probabilities of an unbroken one.

On a real (tiny, float32) model, with every option of sampling, alone and among others, and with
prompts cut into chunks of any size: what an engine's loss may not change.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import FinishReason
from engine_svc.planning.step import SamplingParameters
from tests.fakes.grammars import byte_level_compiler, schema
from tests.fakes.scheduler_driver import Received, SchedulerDriver
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama
from tests.fakes.tiny_tokenizers import IM_END

MAX_TOKENS = 24
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def sampling(**options: object) -> SamplingParameters:
    values = {"temperature": 0.0, "logprobs": True, "top_logprobs": 3, **options}
    return SamplingParameters(max_tokens=MAX_TOKENS, **values)  # type: ignore[arg-type]


# By name: the prompt's length, around the borders of blocks and of the ranges that attention reads.
CASES: dict[str, tuple[int, SamplingParameters]] = {
    "greedy": (5, sampling()),
    "seeded": (31, sampling(temperature=1.0, seed=5)),
    "truncated": (40, sampling(temperature=0.9, seed=9, top_p=0.9, top_k=50, min_p=0.01)),
    "penalties": (
        64,
        sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    ),
    "min_tokens": (
        97,
        sampling(temperature=1.0, seed=2, min_tokens=20, eos_token_ids=frozenset({IM_END})),
    ),
    "bad_words": (33, sampling(temperature=1.0, seed=3, bad_words=((11,), (12, 13), (65, 66, 67)))),
    "logit_bias": (16, sampling(logit_bias=((7, 1.5), (9, -3.0)))),
    "grammar": (
        130,
        sampling(
            temperature=1.0, seed=4, grammar=schema(PERSON), eos_token_ids=frozenset({IM_END})
        ),
    ),
    "prompt_logprobs": (
        200,
        sampling(temperature=0.7, seed=1, prompt_logprobs=True, top_prompt_logprobs=2),
    ),
}


def prompt_of(name: str) -> list[int]:
    length, _ = CASES[name]
    return [(7 * index * index + 31 * length + index) % (VOCAB_SIZE - 2) for index in range(length)]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    config = ExecutorConfig(
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_model_len=0,
        block_size=16,
        kv_memory_bytes=64 << 20,
        num_threads=1,
        dtype="float32",
    )
    executor = Executor.load(path, config, report=lambda text: None)
    with byte_level_compiler() as compiler:
        executor.follow_grammars(compiler)
        yield executor


def make_driver(executor: Executor, chunk: int, prefix_cache: bool = False) -> SchedulerDriver:
    config = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=chunk,
        max_model_len=executor.max_model_len,
        max_waiting=1000,
        num_blocks=executor.num_blocks,
        block_size=16,
        prefix_cache=prefix_cache,
    )
    return SchedulerDriver(config, executor.execute)


def add(driver: SchedulerDriver, name: str, unbroken: Received, num_outputs: int) -> None:
    """The sequence as it goes on after `num_outputs` tokens, under the key (name, num_outputs)."""
    driver.add(
        (name, num_outputs),
        prompt_of(name),
        CASES[name][1],
        output_token_ids=unbroken.token_ids[:num_outputs],
    )


def check_rest(driver: SchedulerDriver, name: str, unbroken: Received, num_outputs: int) -> None:
    rest = driver.received[name, num_outputs]
    assert rest.token_ids == unbroken.token_ids[num_outputs:], (name, num_outputs)
    assert rest.finish == unbroken.finish
    for entry, other in zip(rest.logprobs, unbroken.logprobs[num_outputs:], strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert list(entry.top_token_ids) == list(other.top_token_ids)
        assert list(entry.top_logprobs) == pytest.approx(other.top_logprobs, abs=1e-5)


@pytest.fixture(scope="module")
def unbroken(executor: Executor) -> dict[str, Received]:
    """Each sequence alone, its prompt in one piece."""
    answers = {}
    for name in CASES:
        driver = make_driver(executor, chunk=2048)
        driver.add(name, prompt_of(name), CASES[name][1])
        driver.run(max_steps=MAX_TOKENS)
        answers[name] = driver.received[name]
    return answers


def test_the_sequences_are_long_enough_to_be_broken(unbroken: dict[str, Received]) -> None:
    assert all(len(answer.token_ids) > 15 for answer in unbroken.values())
    assert unbroken["grammar"].finish is not None
    assert unbroken["grammar"].finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
    prompt_logprobs = unbroken["prompt_logprobs"].prompt_logprobs
    assert len(prompt_logprobs) == CASES["prompt_logprobs"][0] - 1


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_alone(
    executor: Executor, unbroken: dict[str, Received], name: str, chunk: int
) -> None:
    length = len(unbroken[name].token_ids)
    for num_outputs in sorted({1, 2, 7, length // 2, length - 1}):
        driver = make_driver(executor, chunk)
        add(driver, name, unbroken[name], num_outputs)
        driver.run(max_steps=100)
        check_rest(driver, name, unbroken[name], num_outputs)
        if name == "prompt_logprobs" and num_outputs == 1:
            # They can be asked for again, and are the same.
            again = driver.received[name, num_outputs].prompt_logprobs
            for entry, other in zip(again, unbroken[name].prompt_logprobs, strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_it_goes_on_among_others_that_were_broken_elsewhere(
    executor: Executor, unbroken: dict[str, Received], chunk: int, prefix_cache: bool
) -> None:
    driver = make_driver(executor, chunk, prefix_cache)
    broken = [
        (name, num_outputs)
        for num_outputs in range(MAX_TOKENS)
        for name in CASES
        if num_outputs < len(unbroken[name].token_ids)
    ]
    for name, num_outputs in broken:
        add(driver, name, unbroken[name], num_outputs)
    driver.run(max_steps=3000)
    for name, num_outputs in broken:
        check_rest(driver, name, unbroken[name], num_outputs)
