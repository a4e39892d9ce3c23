"""The same request gives the same tokens and log-probabilities, to the last bit, whichever build
of the native library computes it, in whatever company, chunks and cache."""

import random
from collections.abc import Hashable
from pathlib import Path

import pytest

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.step import SamplingParameters
from kernels.cpu.library import runnable
from tests.fakes.scheduler_driver import Received, SchedulerDriver
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_qwen3

MAX_TOKENS = 16
NUM_REQUESTS = 50
BUILDS = runnable()
# Weights, and type of KV.
TYPES = [("auto", "auto"), ("int8", "int8"), ("bfloat16", "float16"), ("float32", "float32")]

pytestmark = pytest.mark.skipif(not BUILDS, reason="there is no library")


def load(directory: Path, build: str, weights: str, kv: str, num_threads: int) -> Executor:
    config = ExecutorConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        kv_memory_bytes=16 << 20,
        num_threads=num_threads,
        dtype=weights,
        kv_dtype=kv,
        cpu_kernels=build,
    )
    return Executor.load(directory, config, report=lambda line: None)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def request(number: int) -> tuple[list[int], SamplingParameters]:
    """A prompt of 1 to 90 tokens, of which a third begin alike; greedy or seeded."""
    rng = random.Random(number)
    prompt = [rng.randrange(VOCAB_SIZE - 2) for _ in range(rng.choice([1, 5, 16, 17, 33, 50]))]
    if number % 3 == 0:
        prompt = [*range(40), *prompt]
    sampling = SamplingParameters(
        max_tokens=MAX_TOKENS,
        temperature=rng.choice([0.0, 0.7, 1.2]),
        top_k=rng.choice([0, 0, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=number,
        logprobs=True,
        top_logprobs=3,
    )
    return prompt, sampling


def answers(
    executor: Executor,
    numbers: list[int],
    chunk: int = 512,
    prefix_cache: bool = False,
    num_blocks: int = 0,
) -> dict[Hashable, Received]:
    """What requests receive that are all added at once."""
    config = SchedulerConfig(
        max_num_seqs=min(64, chunk),
        max_num_batched_tokens=chunk,
        max_model_len=executor.max_model_len,
        max_waiting=1000,
        num_blocks=num_blocks or executor.num_blocks,
        block_size=16,
        prefix_cache=prefix_cache,
    )
    driver = SchedulerDriver(config, executor.execute)
    for number in numbers:
        prompt, sampling = request(number)
        driver.add(number, prompt, sampling)
    driver.run(max_steps=5000)
    return driver.received


def assert_equal(received: dict[Hashable, Received], expected: dict[Hashable, Received]) -> None:
    for number, answer in received.items():
        assert answer.token_ids == expected[number].token_ids
        assert answer.logprobs == expected[number].logprobs


@pytest.mark.parametrize(("weights", "kv"), TYPES)
def test_builds_and_threads_agree(model_path: Path, weights: str, kv: str) -> None:
    numbers = list(range(NUM_REQUESTS))
    expected = answers(load(model_path, BUILDS[0], weights, kv, num_threads=1), numbers)
    assert all(len(answer.logprobs) == MAX_TOKENS for answer in expected.values())
    for build in BUILDS[1:]:
        executor = load(model_path, build, weights, kv, num_threads=2)
        assert_equal(answers(executor, numbers), expected)


@pytest.mark.parametrize(("weights", "kv"), TYPES[:2])
def test_company_chunks_cache_and_preemption_change_no_bit(
    model_path: Path, weights: str, kv: str
) -> None:
    executor = load(model_path, BUILDS[-1], weights, kv, num_threads=2)
    numbers = list(range(NUM_REQUESTS))
    expected = answers(executor, numbers)
    for number in numbers[::7]:
        assert_equal(answers(executor, [number]), expected)
    shuffled = random.Random(5).sample(numbers, len(numbers))
    for size in (2, 3, 8):
        assert_equal(answers(executor, shuffled[:size]), expected)
    for chunk in (1, 16, 64):
        assert_equal(answers(executor, shuffled[:12], chunk=chunk), expected)
    for _ in range(2):
        assert_equal(answers(executor, shuffled, prefix_cache=True), expected)
    assert_equal(answers(executor, shuffled[:20], num_blocks=16), expected)


def test_a_record_goes_on_in_another_engine_as_it_would_have(model_path: Path) -> None:
    first = load(model_path, BUILDS[0], "auto", "auto", num_threads=1)
    second = load(model_path, BUILDS[-1], "auto", "auto", num_threads=2)
    expected = answers(first, list(range(12)))
    config = SchedulerConfig(64, 64, 512, 100, second.num_blocks, 16)
    driver = SchedulerDriver(config, second.execute)
    for number in range(12):
        prompt, sampling = request(number)
        outputs = expected[number].token_ids[: number + 1]
        driver.add(number, prompt, sampling, output_token_ids=outputs)
    driver.run(max_steps=1000)
    for number in range(12):
        answer, whole = driver.received[number], expected[number]
        assert answer.token_ids == whole.token_ids[number + 1 :]
        assert answer.logprobs == whole.logprobs[number + 1 :]
