"""The same request gives the same tokens: on a real (tiny, float32) model, however it is run.

Planning alone is tested so with a fake executor; here the real one computes, so its paged KV, its
positions and masks, and its sampler are held to the same rule.
"""

import random
from pathlib import Path

import pytest

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.step import SamplingParameters
from tests.fakes.scheduler_driver import Received, SchedulerDriver
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama
from tests.fakes.tiny_tokenizers import IM_END

MAX_TOKENS = 24
LARGE_POOL, SMALL_POOL = 400, 12


def load_executor(directory: Path, block_size: int) -> Executor:
    config = ExecutorConfig(
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_model_len=0,
        block_size=block_size,
        kv_memory_bytes=64 << 20,
        num_threads=1,
        dtype="float32",
    )
    return Executor.load(directory, config, report=lambda text: None)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def executor(model_path: Path) -> Executor:
    """Shared by all tests: what it keeps of one run must not show in the next."""
    return load_executor(model_path, block_size=16)


def make_driver(
    executor: Executor, *, prefix_cache: bool, max_num_batched_tokens: int, num_blocks: int
) -> SchedulerDriver:
    assert num_blocks <= executor.num_blocks
    config = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=executor.max_model_len,
        max_waiting=100,
        num_blocks=num_blocks,
        block_size=executor.block_size,
        prefix_cache=prefix_cache,
    )
    return SchedulerDriver(config, executor.execute)


def prompt_of(length: int, number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(VOCAB_SIZE - 2) for _ in range(length)]


def workload() -> list[tuple[list[int], SamplingParameters]]:
    """Sixteen requests of 1 to 90 tokens, greedy and seeded; half begin with the same 40 tokens."""
    head = prompt_of(40, number=1000)
    requests = []
    for number, length in enumerate([1, 15, 16, 17, 31, 32, 33, 50, 2, 8, 20, 24, 33, 40, 48, 50]):
        prompt = prompt_of(length, number)
        sampling = SamplingParameters(
            max_tokens=MAX_TOKENS,
            temperature=(number // 2) % 2 * 0.9,
            top_k=40 if number % 3 == 0 else 0,
            top_p=0.95 if number % 3 == 1 else 1.0,
            repetition_penalty=1.2 if number % 4 == 3 else 1.0,
            presence_penalty=0.3 if number % 4 == 1 else 0.0,
            seed=number,
            min_tokens=MAX_TOKENS - 2 if number % 5 == 0 else 0,
            eos_token_ids=frozenset({IM_END}),
            logit_bias=((7, 1.5), (9, -3.0)) if number % 5 == 1 else (),
            allowed_token_ids=frozenset(range(0, 200, 2)) if number % 5 == 2 else frozenset(),
            bad_words=((11,), (12, 13), (14, 15, 16)) if number % 5 == 3 else (),
            prompt_logprobs=number % 3 == 0,
            top_prompt_logprobs=2,
        )
        requests.append((head + prompt if number % 2 else prompt, sampling))
    return requests


def check_prompt_logprobs(driver: SchedulerDriver, key: tuple[int, int], whole: Received) -> None:
    """Those of `key` are the same as when its prompt was computed in one piece."""
    received = driver.received[key].prompt_logprobs
    assert len(received) == len(whole.prompt_logprobs)
    for entry, other in zip(received, whole.prompt_logprobs, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert list(entry.top_logprobs) == pytest.approx(other.top_logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def whole(executor: Executor) -> list[Received]:
    """Each request alone, its prompt in one piece, without a cache."""
    answers = []
    for prompt, sampling in workload():
        driver = make_driver(
            executor, prefix_cache=False, max_num_batched_tokens=2048, num_blocks=LARGE_POOL
        )
        driver.add("alone", prompt, sampling)
        assert driver.run(max_steps=MAX_TOKENS) == MAX_TOKENS
        answers.append(driver.received["alone"])
    return answers


@pytest.fixture(scope="module")
def reference(whole: list[Received]) -> list[list[int]]:
    return [received.token_ids for received in whole]


def test_prompts_that_are_asked_about_are_answered(whole: list[Received]) -> None:
    for (prompt, sampling), received in zip(workload(), whole, strict=True):
        expected = (len(prompt) - 1) * sampling.prompt_logprobs
        assert len(received.prompt_logprobs) == expected


def test_the_requests_differ_so_that_mixing_them_up_would_show(
    reference: list[list[int]],
) -> None:
    assert len({tuple(answer) for answer in reference}) == len(reference)
    # A model stuck on one token would hide wrong KV.
    assert all(len(set(answer)) > MAX_TOKENS // 3 for answer in reference)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 2048])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_alone_with_any_chunk_size_with_and_without_the_cache(
    executor: Executor,
    reference: list[list[int]],
    whole: list[Received],
    prefix_cache: bool,
    max_num_batched_tokens: int,
) -> None:
    driver = make_driver(
        executor,
        prefix_cache=prefix_cache,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=LARGE_POOL,
    )
    for repeat in range(2):
        for number, (prompt, sampling) in enumerate(workload()):
            driver.add((number, repeat), prompt, sampling)
            driver.run(max_steps=100)
            assert driver.received[number, repeat].token_ids == reference[number]
            check_prompt_logprobs(driver, (number, repeat), whole[number])
    assert bool(driver.scheduler.load.num_prefix_cache_hit_tokens) == prefix_cache


@pytest.mark.parametrize("num_blocks", [LARGE_POOL, SMALL_POOL])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 2048])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_among_fifteen_others_with_any_chunk_size_cache_and_preemption(
    executor: Executor,
    reference: list[list[int]],
    whole: list[Received],
    prefix_cache: bool,
    max_num_batched_tokens: int,
    num_blocks: int,
) -> None:
    driver = make_driver(
        executor,
        prefix_cache=prefix_cache,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
    )
    for repeat in range(2):
        for number, (prompt, sampling) in enumerate(workload()):
            driver.add((number, repeat), prompt, sampling)
        driver.run(max_steps=1000)
        for number, answer in enumerate(reference):
            assert driver.received[number, repeat].token_ids == answer
            check_prompt_logprobs(driver, (number, repeat), whole[number])
    assert bool(driver.scheduler.load.num_preemptions) == (num_blocks == SMALL_POOL)
    assert driver.scheduler.load.num_free_blocks == num_blocks


def test_continued_from_its_record_after_any_number_of_outputs(
    executor: Executor, reference: list[list[int]]
) -> None:
    driver = make_driver(
        executor, prefix_cache=True, max_num_batched_tokens=2048, num_blocks=LARGE_POOL
    )
    for num_outputs in range(1, MAX_TOKENS):
        number = num_outputs % len(reference)
        prompt, sampling = workload()[number]
        outputs = reference[number][:num_outputs]
        driver.add(num_outputs, prompt, sampling, output_token_ids=outputs)
    driver.run(max_steps=1000)
    for num_outputs in range(1, MAX_TOKENS):
        expected = reference[num_outputs % len(reference)][num_outputs:]
        assert driver.received[num_outputs].token_ids == expected


@pytest.mark.parametrize("max_num_batched_tokens", [16, 2048])
def test_bug_67_a_cached_prompt_changes_neither_ids_nor_logprobs(
    executor: Executor, max_num_batched_tokens: int
) -> None:
    sampling = SamplingParameters(max_tokens=12, temperature=0.0, logprobs=True, top_logprobs=3)
    head = prompt_of(32, number=500)
    prompts = [prompt_of(length, length) for length in (15, 16, 17, 32, 33)]
    prompts += [head + prompt_of(length, 600 + length) for length in (1, 9, 20)]

    def run(prefix_cache: bool) -> SchedulerDriver:
        driver = make_driver(
            executor,
            prefix_cache=prefix_cache,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=LARGE_POOL,
        )
        for repeat in range(3):
            for number, prompt in enumerate(prompts):
                driver.add((number, repeat), prompt, sampling)
                driver.run(max_steps=50)
        return driver

    without, cached = run(prefix_cache=False), run(prefix_cache=True)
    for key, received in cached.received.items():
        assert received.token_ids == without.received[key].token_ids
        for entry, other in zip(received.logprobs, without.received[key].logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert list(entry.top_logprobs) == pytest.approx(other.top_logprobs, abs=1e-4)
    hits = [
        [cached.requests[number, repeat].num_cached_tokens for number in range(5)]
        for repeat in range(3)
    ]
    assert hits == [[0, 0, 0, 0, 0], [0, 0, 16, 16, 32], [0, 0, 16, 16, 32]]


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bug_72_preemption_changes_no_answer(
    model_path: Path, temperature: float, num_choices: int
) -> None:
    executor = load_executor(model_path, block_size=4)

    def run(num_blocks: int) -> tuple[SchedulerDriver, int]:
        driver = make_driver(
            executor, prefix_cache=True, max_num_batched_tokens=256, num_blocks=num_blocks
        )
        for request in range(3):
            for choice in range(num_choices):
                sampling = SamplingParameters(max_tokens=20, temperature=temperature, seed=choice)
                driver.add((request, choice), prompt_of(12, request), sampling)
        return driver, driver.run(max_steps=1000)

    small, num_steps = run(12)
    large, ideal_num_steps = run(1000)
    assert small.scheduler.load.num_preemptions >= 1
    assert small.requests[0, 0].num_preemptions == 0, "the oldest was a victim"
    assert num_steps < 10 * ideal_num_steps
    assert small.scheduler.load.num_free_blocks == 12
    for key, received in small.received.items():
        assert received.token_ids == large.received[key].token_ids
        assert received.finish == large.received[key].finish
        assert received.num_starts == 1
        assert len(received.token_ids) == 20
