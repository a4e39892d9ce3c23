"""Known faults of other servers, at the level of the scheduler, with exactly the inputs given."""

import random

import pytest

from engine_svc.planning.errors import KvCapacityExceeded
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import FinishReason
from engine_svc.planning.step import SamplingParameters
from tests.fakes.fake_executor import FakeExecutor, reference_outputs
from tests.fakes.scheduler_driver import SchedulerDriver, greedy, seeded

VOCAB_SIZE = 64


def make_driver(num_blocks: int, block_size: int, **limits: int | bool) -> SchedulerDriver:
    values = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 16_384,
        "max_waiting": 1000,
        **limits,
    }
    config = SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **values)  # type: ignore[arg-type]
    executor = FakeExecutor(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB_SIZE)
    return SchedulerDriver(config, executor.execute)


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(7 * index + 13 * number + 1) % VOCAB_SIZE for index in range(length)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_bug_63_three_hundred_aborts_at_random_points_leave_nothing(prefix_cache: bool) -> None:
    driver = make_driver(700, 16, prefix_cache=prefix_cache)
    rng = random.Random(63)
    live: list[int] = []
    for number in range(300):
        driver.add(number, prompt_of(rng.randint(1, 100), number), greedy(10_000))
        live.append(number)
        for _ in range(rng.randint(0, 3)):
            driver.step()
        # Some clients leave while a step runs, some before their first token, some much later.
        leaving = [live.pop(rng.randrange(len(live))) for _ in range(rng.randint(0, len(live)))]
        if leaving and rng.random() < 0.5 and driver.scheduler.has_requests:
            driver.step(while_executing=lambda keys=leaving: [driver.abort(k) for k in keys])
        else:
            for key in leaving:
                driver.abort(key)
    for key in live:
        driver.abort(key)
    load = driver.scheduler.load
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, 700)
    assert not driver.scheduler.has_requests
    assert {entry.finish.reason for entry in driver.received.values()} == {FinishReason.CANCELLED}
    driver.add("after", prompt_of(20), greedy(20))
    driver.run(max_steps=20)
    expected, _ = reference_outputs(prompt_of(20), greedy(20), VOCAB_SIZE)
    assert driver.received["after"].token_ids == expected


def test_bug_66_requests_that_can_never_fit_are_refused_and_block_nobody() -> None:
    driver = make_driver(8, 16, max_model_len=512)
    with pytest.raises(KvCapacityExceeded):
        driver.add("a", prompt_of(200), greedy(1))
    with pytest.raises(KvCapacityExceeded):
        driver.add("b", prompt_of(100), greedy(100))
    driver.add("c", prompt_of(5), greedy(5))
    assert driver.run(max_steps=5) == 5
    assert driver.received["c"].finish.reason is FinishReason.LENGTH


def test_bug_66_more_choices_than_fit_at_once_run_in_turns() -> None:
    driver = make_driver(8, 16, max_model_len=512)
    for choice in range(8):
        driver.add(choice, prompt_of(60), seeded(60, seed=choice))
    driver.run(max_steps=8 * 60)
    for choice in range(8):
        expected, reason = reference_outputs(prompt_of(60), seeded(60, seed=choice), VOCAB_SIZE)
        assert driver.received[choice].token_ids == expected
        assert driver.received[choice].finish.reason is reason
    assert driver.scheduler.load.num_free_blocks == 8


def test_bug_66_a_request_that_fills_the_pool_exactly_runs_to_its_end() -> None:
    driver = make_driver(8, 16, max_model_len=512)
    driver.add("fills", prompt_of(100), greedy(28))
    assert driver.run(max_steps=28) == 28
    assert driver.scheduler.load.num_preemptions == 0


@pytest.mark.parametrize("max_num_batched_tokens", [8, 256])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_bug_67_a_cached_prompt_leaves_a_token_to_compute_and_changes_no_answer(
    prefix_cache: bool, max_num_batched_tokens: int
) -> None:
    driver = make_driver(
        100, 16, prefix_cache=prefix_cache, max_num_batched_tokens=max_num_batched_tokens
    )
    for length, num_cached_tokens in [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)]:
        prompt = prompt_of(length, number=length)
        expected, _ = reference_outputs(prompt, greedy(12), VOCAB_SIZE)
        for repeat in range(3):
            request = driver.add((length, repeat), prompt, greedy(12))
            driver.run(max_steps=30)
            assert driver.received[length, repeat].token_ids == expected
            hit = num_cached_tokens if prefix_cache and repeat else 0
            assert request.num_cached_tokens == hit < length
    head = prompt_of(32, number=99)
    for tail in ([1], [2, 3], list(range(20))):
        request = driver.add(("tail", len(tail)), head + tail, greedy(12))
        driver.run(max_steps=30)
        expected, _ = reference_outputs(head + tail, greedy(12), VOCAB_SIZE)
        assert driver.received["tail", len(tail)].token_ids == expected
    assert request.num_cached_tokens == (32 if prefix_cache else 0)


def sampling_of(choice: int, temperature: float) -> SamplingParameters:
    return SamplingParameters(max_tokens=20, temperature=temperature, seed=1000 + choice)


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_bug_72_preemption_changes_no_answer_and_ends(
    prefix_cache: bool, temperature: float, num_choices: int
) -> None:
    def run(num_blocks: int) -> tuple[SchedulerDriver, int]:
        driver = make_driver(num_blocks, 4, prefix_cache=prefix_cache)
        for request in range(3):
            for choice in range(num_choices):
                sampling = sampling_of(choice, temperature)
                driver.add((request, choice), prompt_of(12, number=request), sampling)
        num_steps = driver.run(max_steps=1000)
        assert driver.scheduler.load.num_free_blocks == num_blocks
        return driver, num_steps

    small, num_steps = run(12)
    large, ideal_num_steps = run(1000)
    assert small.scheduler.load.num_preemptions >= 1
    assert small.requests[0, 0].num_preemptions == 0, "the oldest was a victim"
    assert large.scheduler.load.num_preemptions == 0
    assert num_steps < 10 * ideal_num_steps
    for key, received in small.received.items():
        assert received.token_ids == large.received[key].token_ids
        assert received.finish == large.received[key].finish
        assert received.num_starts == 1
        assert len(received.token_ids) == 20
