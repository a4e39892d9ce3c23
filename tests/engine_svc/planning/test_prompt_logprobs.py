"""Log-probabilities of a prompt: once, whole and in time, whatever the scheduler does meanwhile."""

import pytest

from engine_svc.planning.limits import SchedulerConfig
from tests.fakes.fake_executor import (
    FakeExecutor,
    reference_outputs,
    reference_prompt_logprobs,
)
from tests.fakes.scheduler_driver import SchedulerDriver, greedy

VOCAB_SIZE = 64
PROMPT = [number % 50 for number in range(1, 90, 3)]
ASKING = greedy(5, prompt_logprobs=True, top_prompt_logprobs=3)
EXPECTED = reference_prompt_logprobs(PROMPT, 3, VOCAB_SIZE)


def make_driver(*, num_blocks: int = 100, max_num_batched_tokens: int = 64) -> SchedulerDriver:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=200,
        max_waiting=100,
        num_blocks=num_blocks,
        block_size=4,
    )
    executor = FakeExecutor(num_blocks=num_blocks, block_size=4, vocab_size=VOCAB_SIZE)
    return SchedulerDriver(config, executor.execute)


@pytest.mark.parametrize("max_num_batched_tokens", [4, 7, len(PROMPT) - 1, len(PROMPT), 64])
def test_they_are_complete_with_the_first_token_for_any_chunk_size(
    max_num_batched_tokens: int,
) -> None:
    driver = make_driver(max_num_batched_tokens=max_num_batched_tokens)
    driver.add("a", PROMPT, ASKING)
    while not driver.received["a"].token_ids:
        driver.step()
    assert driver.received["a"].prompt_logprobs == EXPECTED
    driver.run(max_steps=5)
    assert driver.received["a"].token_ids == reference_outputs(PROMPT, ASKING, VOCAB_SIZE)[0]


@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_a_short_prompt_that_ends_at_once_has_one_for_each_token_but_the_first(
    length: int,
) -> None:
    driver = make_driver()
    driver.add("a", PROMPT[:length], greedy(1, prompt_logprobs=True, top_prompt_logprobs=3))
    driver.run(max_steps=1)
    assert driver.received["a"].finish is not None
    assert driver.received["a"].prompt_logprobs == EXPECTED[: length - 1]


def test_the_cache_is_passed_by_but_filled_for_others() -> None:
    driver = make_driver()
    requests = {}
    for key, sampling in (("plain", greedy(5)), ("asking", ASKING), ("again", ASKING)):
        requests[key] = driver.add(key, PROMPT, sampling)
        driver.run(max_steps=5)
    assert requests["asking"].num_cached_tokens == requests["again"].num_cached_tokens == 0
    assert driver.received["asking"].prompt_logprobs == EXPECTED
    assert driver.received["again"].prompt_logprobs == EXPECTED
    assert driver.received["plain"].prompt_logprobs == []
    fresh = make_driver()
    fresh.add("asking", PROMPT, ASKING)
    fresh.run(max_steps=5)
    after = fresh.add("plain", PROMPT, greedy(5))
    fresh.run(max_steps=5)
    assert after.num_cached_tokens == (len(PROMPT) - 1) // 4 * 4
    assert fresh.received["plain"].token_ids == fresh.received["asking"].token_ids


def test_a_preemption_after_the_prompt_does_not_compute_them_again() -> None:
    # 8 blocks of prompt for one, 1 for the other: the one that came later must give way.
    driver = make_driver(num_blocks=11)
    driver.add("first", [1, 2, 3], greedy(12))
    asking = driver.add("asking", PROMPT, greedy(12, prompt_logprobs=True, top_prompt_logprobs=3))
    driver.run(max_steps=100)
    assert asking.num_preemptions
    assert driver.received["asking"].prompt_logprobs == EXPECTED
    scored = [step for plan in driver.plans for step in plan.steps if step.prompt_logprobs]
    assert sum(step.num_scheduled_tokens for step in scored) == len(PROMPT)


@pytest.mark.parametrize("step", range(1, 8))
def test_a_preemption_in_the_middle_of_the_prompt_loses_and_repeats_none(step: int) -> None:
    driver = make_driver(num_blocks=11, max_num_batched_tokens=5)
    driver.add("first", [1, 2], greedy(30))
    for _ in range(step):
        driver.step()
    asking = driver.add("asking", PROMPT, ASKING)
    driver.run(max_steps=200)
    assert driver.received["asking"].prompt_logprobs == EXPECTED
    assert driver.received["asking"].token_ids == reference_outputs(PROMPT, ASKING, VOCAB_SIZE)[0]
    assert asking.finish is not None


def test_a_continued_record_that_asks_is_given_those_of_its_prompt_alone() -> None:
    outputs = reference_outputs(PROMPT, ASKING, VOCAB_SIZE)[0]
    driver = make_driver(max_num_batched_tokens=8)
    driver.add("a", PROMPT, ASKING, output_token_ids=outputs[:3])
    driver.run(max_steps=20)
    assert driver.received["a"].prompt_logprobs == EXPECTED
    assert driver.received["a"].token_ids == outputs[3:]
