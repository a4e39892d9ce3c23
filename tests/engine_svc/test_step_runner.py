"""Steps on their way through the executor: their order, their own time, what fails with what."""

import math
from collections.abc import Iterator

import pytest

from engine_svc.planning.errors import ComputeLost
from engine_svc.planning.step import RowStart, RowStep, SamplingParameters, StepPlan
from engine_svc.step_runner import StepRunner
from engine_svc.step_watchdog import StepWatchdog
from tests.fakes.overlapping_executor import OverlappingExecutor, StepFailed


def plans() -> Iterator[StepPlan]:
    """Steps of one row: its prompt, then a token each."""
    sampling = SamplingParameters(max_tokens=100)
    yield StepPlan([RowStart(0, [1, 2, 3], 3, sampling, [])], [RowStep(0, 0, 3, [0], True)])
    for position in range(3, 16):
        yield StepPlan([], [RowStep(0, position, 1, (), True)])


def make_runner(executor: OverlappingExecutor, max_in_flight: int = 2) -> StepRunner:
    return StepRunner(executor, max_in_flight, StepWatchdog(math.inf))


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_steps_land_in_the_order_of_their_launch(max_in_flight: int) -> None:
    executor = OverlappingExecutor()
    runner = make_runner(executor, max_in_flight)
    launched, landed = [], []
    for plan in plans():
        assert runner.may_launch
        runner.launch(plan)
        launched.append(plan)
        if not runner.may_launch:
            landed.append(runner.land())
    while not runner.is_idle:
        landed.append(runner.land())
    assert all(step.plan is plan for step, plan in zip(landed, launched, strict=True))
    assert all(step.result is not None for step in landed)
    assert executor.num_launched_ahead == (len(launched) - 1) * (max_in_flight - 1)


def test_a_step_is_timed_from_the_end_of_the_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("engine_svc.step_runner.time.perf_counter", lambda: clock[0])

    def take_a_while(number: int) -> None:
        clock[0] += number + 1

    runner = make_runner(OverlappingExecutor(before_wait=take_a_while))
    seconds = []
    first, second, third, *_ = plans()
    runner.launch(first)
    runner.launch(second)
    seconds.append(runner.land().seconds)
    # Planning and publishing, while the second step runs.
    clock[0] += 0.5
    runner.launch(third)
    seconds.append(runner.land().seconds)
    seconds.append(runner.land().seconds)
    assert seconds == [1.0, 2.5, 3.0]


def test_a_step_that_nothing_ran_before_is_timed_from_its_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("engine_svc.step_runner.time.perf_counter", lambda: clock[0])
    runner = make_runner(OverlappingExecutor())
    first, second, *_ = plans()
    for plan, now in ((first, 1.0), (second, 5.0)):
        clock[0] = now
        runner.launch(plan)
        clock[0] += 0.25
        assert runner.land().seconds == 0.25


def test_a_failure_takes_along_what_was_launched_after_it() -> None:
    executor = OverlappingExecutor(failing_steps={0})
    runner = make_runner(executor)
    first, second, *_ = plans()
    runner.launch(first)
    runner.launch(second)
    landed = runner.land()
    assert landed.plan is first and landed.result is None
    assert runner.is_idle and runner.may_launch
    assert executor.num_waited_for == 2


def test_nothing_is_launched_behind_a_launch_that_failed_nor_is_the_step_before_it_lost() -> None:
    runner = make_runner(OverlappingExecutor(failing_launches={1}))
    first, second, *_ = plans()
    runner.launch(first)
    runner.launch(second)
    assert runner.land().result is not None
    assert not runner.may_launch and not runner.is_idle
    landed = runner.land()
    assert landed.plan is second and landed.result is None
    assert runner.may_launch


def test_it_gives_up_when_three_fail_in_a_row_not_counting_those_that_fell_with_them() -> None:
    executor = OverlappingExecutor(failing_steps=range(100))
    runner = make_runner(executor)
    for _ in range(2):
        first, second, *_ = plans()
        runner.launch(first)
        runner.launch(second)
        assert runner.land().result is None
    runner.launch(next(plans()))
    with pytest.raises(StepFailed):
        runner.land()
    assert executor.num_waited_for == 5


def test_it_gives_up_at_once_when_the_executor_is_of_no_more_use() -> None:
    def lose(number: int) -> None:
        raise ComputeLost("rank 1 is gone")

    runner = make_runner(OverlappingExecutor(before_wait=lose))
    runner.launch(next(plans()))
    with pytest.raises(ComputeLost, match="rank 1 is gone"):
        runner.land()


def test_a_runner_asks_no_more_of_an_executor_than_it_can_do() -> None:
    executor = OverlappingExecutor()
    executor.max_steps_in_flight = 1
    with pytest.raises(AssertionError):
        make_runner(executor)
