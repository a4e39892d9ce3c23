"""Speculation changes no answer: on a real (tiny) model, ids and log-probabilities stay the same
bits, whatever is guessed, accepted and rejected.
"""

import random
from collections.abc import Hashable

import pytest

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.step import SamplingParameters
from tests.fakes.drafters import KnowingDrafter
from tests.fakes.scheduler_driver import Received, SchedulerDriver
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama
from tests.fakes.tiny_tokenizers import IM_END

MAX_TOKENS, MAX_DRAFT_TOKENS = 24, 6
LARGE_POOL, SMALL_POOL = 1000, 31
OPTIONS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.9, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.5, "logprobs": True},
    {"temperature": 0.9, "top_p": 0.9, "min_tokens": 12},
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.7, "min_tokens": 5, "logit_bias": ((7, 2.0), (9, -3.0), (IM_END, 12.0))},
    {"temperature": 1.0, "allowed_token_ids": frozenset(range(0, 200, 3)), "logprobs": True},
    {"temperature": 0.6, "bad_words": ((11,), (12, 13), (14, 15, 16))},
    {"temperature": 1.0, "allowed_token_ids": frozenset((5, 6, 7)), "bad_words": ((5, 6), (7, 7))},
    {"temperature": 1.2, "stop_token_ids": frozenset(range(0, 50)), "min_tokens": 3},
)


def workload() -> list[tuple[list[int], SamplingParameters]]:
    rng = random.Random(7)
    head = [rng.randrange(VOCAB_SIZE - 2) for _ in range(40)]
    requests = []
    for number, options in enumerate(OPTIONS):
        prompt = [rng.randrange(VOCAB_SIZE - 2) for _ in range(rng.randint(1, 50))]
        sampling = SamplingParameters(
            max_tokens=MAX_TOKENS, seed=number, eos_token_ids=frozenset({IM_END}), **options
        )
        requests.append((head + prompt if number % 2 else prompt, sampling))
    return requests


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    config = ExecutorConfig(
        max_num_seqs=16,
        max_num_batched_tokens=512,
        block_size=4,
        kv_memory_bytes=64 << 20,
        num_threads=1,
    )
    directory = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return Executor.load(directory, config, report=lambda text: None)


def make_driver(
    executor: Executor,
    drafter: KnowingDrafter | None,
    *,
    prefix_cache: bool = False,
    max_num_batched_tokens: int = 512,
    num_blocks: int = LARGE_POOL,
) -> SchedulerDriver:
    config = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=executor.max_model_len,
        max_waiting=100,
        num_blocks=num_blocks,
        block_size=executor.block_size,
        prefix_cache=prefix_cache,
        max_draft_tokens=MAX_DRAFT_TOKENS if drafter else 0,
    )
    return SchedulerDriver(config, executor.execute, drafter)


@pytest.fixture(scope="module")
def reference(executor: Executor) -> list[Received]:
    """Each request alone, without guesses."""
    answers = []
    for prompt, sampling in workload():
        driver = make_driver(executor, None)
        driver.add("alone", prompt, sampling)
        driver.run(max_steps=MAX_TOKENS)
        answers.append(driver.received["alone"])
    return answers


def knowing(reference: list[Received], keys: list[Hashable]) -> KnowingDrafter:
    drafter = KnowingDrafter(VOCAB_SIZE, MAX_DRAFT_TOKENS)
    drafter.outputs = {
        key: received.token_ids for key, received in zip(keys, reference, strict=True)
    }
    return drafter


def check_load(driver: SchedulerDriver) -> None:
    load = driver.scheduler.load
    assert 0 < load.num_accepted_draft_tokens < load.num_draft_tokens


def test_the_requests_end_in_different_ways(reference: list[Received]) -> None:
    assert len({len(received.token_ids) for received in reference}) > 2
    assert len({received.finish for received in reference}) > 2


def test_alone(executor: Executor, reference: list[Received]) -> None:
    num_steps = num_tokens = 0
    for number, (prompt, sampling) in enumerate(workload()):
        driver = make_driver(executor, knowing([reference[number]], [number]))
        driver.add(number, prompt, sampling)
        num_steps += driver.run(max_steps=MAX_TOKENS)
        num_tokens += len(reference[number].token_ids)
        assert driver.received[number] == reference[number]
    assert num_steps < 0.7 * num_tokens


@pytest.mark.parametrize("num_blocks", [LARGE_POOL, SMALL_POOL])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 512])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_in_a_batch_with_any_chunk_size_cache_and_preemption(
    executor: Executor,
    reference: list[Received],
    prefix_cache: bool,
    max_num_batched_tokens: int,
    num_blocks: int,
) -> None:
    driver = make_driver(
        executor,
        knowing(reference, list(range(len(reference)))),
        prefix_cache=prefix_cache,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
    )
    for number, (prompt, sampling) in enumerate(workload()):
        driver.add(number, prompt, sampling)
    driver.run(max_steps=500)
    for number, received in enumerate(reference):
        assert driver.received[number] == received, OPTIONS[number]
    check_load(driver)
    assert bool(driver.scheduler.load.num_preemptions) == (num_blocks == SMALL_POOL)
    assert driver.scheduler.load.num_free_blocks == num_blocks


def test_continued_from_a_record(executor: Executor, reference: list[Received]) -> None:
    drafter = KnowingDrafter(VOCAB_SIZE, MAX_DRAFT_TOKENS)
    driver = make_driver(executor, drafter, prefix_cache=True)
    records = [(number, count) for number in range(len(OPTIONS)) for count in (1, 2, 7, 13)]
    for number, count in records:
        prompt, sampling = workload()[number]
        outputs = reference[number].token_ids
        drafter.outputs[number, count] = outputs
        driver.add((number, count), prompt, sampling, output_token_ids=outputs[:count])
    driver.run(max_steps=500)
    for number, count in records:
        received, whole = driver.received[number, count], reference[number]
        assert received.token_ids == whole.token_ids[count:]
        assert received.logprobs == whole.logprobs[count:]
    check_load(driver)
