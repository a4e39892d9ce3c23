"""Random workloads with two steps in flight: every request is answered as with one.

The fake device computes a step when it is waited for, from its own copy of the tokens, and checks
that nothing it works on is given to others before. Answers are compared with the reference, which
knows neither steps nor blocks, so they are the same with one and with two.
"""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine_svc.planning.limits import SchedulerConfig
from tests.fakes.overlapping_driver import OverlappingDriver
from tests.fakes.overlapping_executor import OverlappingExecutor
from tests.fakes.scheduler_workloads import (
    BAD_TOKEN,
    VOCAB_SIZE,
    Arrival,
    arrivals,
    check_answers,
    check_idle,
    configs,
    crowded_configs,
    run_workload,
)


def check_workload(
    config: SchedulerConfig,
    workload: list[Arrival],
    nan_token_id: int | None = None,
    failing_launches: frozenset[int] = frozenset(),
    failing_steps: frozenset[int] = frozenset(),
) -> OverlappingExecutor:
    executor = OverlappingExecutor(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        vocab_size=VOCAB_SIZE,
        nan_token_id=nan_token_id,
        failing_launches=failing_launches,
        failing_steps=failing_steps,
    )
    driver = OverlappingDriver(config, executor)
    run_workload(driver, workload)
    driver.land_all()
    check_idle(driver, config.num_blocks)
    check_answers(driver, workload, nan_token_id=nan_token_id)
    load = driver.scheduler.load
    event("preempted" if load.num_preemptions else "not preempted")
    event("cache hit" if load.num_prefix_cache_hit_tokens else "no cache hit")
    event("in a failed step" if driver.failed else "no step failed")
    return executor


bad_tokens = st.sampled_from([None, None, BAD_TOKEN])


@settings(max_examples=150, deadline=None)
@given(configs(2), st.lists(arrivals(), min_size=1, max_size=16), bad_tokens)
def test_blocks_and_rows_have_one_owner_and_every_request_ends_with_the_right_answer(
    config: SchedulerConfig, workload: list[Arrival], nan_token_id: int | None
) -> None:
    executor = check_workload(config, workload, nan_token_id)
    event("planned ahead" if executor.num_launched_ahead else "nothing planned ahead")


@settings(max_examples=100, deadline=None)
@given(crowded_configs(2), st.lists(arrivals(), min_size=8, max_size=16), bad_tokens)
def test_the_same_holds_when_many_requests_crowd_a_small_pool(
    config: SchedulerConfig, workload: list[Arrival], nan_token_id: int | None
) -> None:
    check_workload(config, workload, nan_token_id)


@settings(max_examples=100, deadline=None)
@given(
    configs(2) | crowded_configs(2),
    st.lists(arrivals(), min_size=4, max_size=16),
    st.frozensets(st.integers(0, 30), max_size=1),
    st.frozensets(st.integers(0, 30), max_size=1),
)
def test_steps_that_fail_end_only_the_requests_of_what_was_in_flight(
    config: SchedulerConfig,
    workload: list[Arrival],
    failing_launches: frozenset[int],
    failing_steps: frozenset[int],
) -> None:
    check_workload(config, workload, None, failing_launches, failing_steps)


@settings(max_examples=30, deadline=None)
@given(configs(2), st.lists(arrivals(), min_size=1, max_size=16))
def test_an_executor_that_could_do_more_runs_one_step_at_a_time_when_told(
    config: SchedulerConfig, workload: list[Arrival]
) -> None:
    executor = check_workload(replace(config, max_steps_in_flight=1), workload)
    assert not executor.num_launched_ahead


@pytest.mark.parametrize("num_steps", [0, 3])
def test_there_are_one_or_two_steps_in_flight(num_steps: int) -> None:
    with pytest.raises(ValueError, match="max_steps_in_flight"):
        SchedulerConfig(1, 1, 1, 1, 1, 1, max_steps_in_flight=num_steps)
