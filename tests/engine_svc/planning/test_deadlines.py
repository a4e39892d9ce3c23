"""A request whose deadline has come gets no further step."""

from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import Finish, FinishReason
from engine_svc.planning.step import StepPlan
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.scheduler_driver import SchedulerDriver, greedy

TIMEOUT = Finish(FinishReason.TIMEOUT)


def make_driver(max_num_seqs: int) -> SchedulerDriver:
    executor = FakeExecutor(num_blocks=50, block_size=4)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_model_len=100,
        max_waiting=100,
        num_blocks=50,
        block_size=4,
    )
    return SchedulerDriver(config, executor.execute)


def num_starts(plans: list[StepPlan]) -> int:
    return sum(len(plan.starts) for plan in plans)


def test_one_that_still_waits_is_never_computed() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("runs", [1, 2, 3], greedy(10))
    driver.add("waits", [4, 5, 6], greedy(10), deadline=5.0)
    for now in (3.0, 4.0, 5.0, 6.0):
        driver.end_late(now)
        driver.step()
    assert driver.received["waits"].finish == TIMEOUT
    assert driver.received["waits"].token_ids == []
    driver.run(max_steps=20)
    assert driver.received["runs"].finish == Finish(FinishReason.LENGTH)
    assert num_starts(driver.plans) == 1


def test_one_that_is_late_already_when_it_comes_is_never_computed() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("late", [1], greedy(10), deadline=1.0)
    driver.end_late(1.0)
    assert driver.received["late"].finish == TIMEOUT
    assert not driver.scheduler.has_requests


def test_one_that_runs_ends_at_the_next_step_and_frees_its_blocks() -> None:
    driver = make_driver(max_num_seqs=2)
    driver.add("late", [1, 2, 3], greedy(10), deadline=2.0)
    driver.add("other", [4, 5], greedy(3), deadline=50.0)
    for now in (0.0, 1.0, 1.9, 2.1):
        driver.end_late(now)
        if driver.scheduler.has_requests:
            driver.step()
    assert len(driver.received["late"].token_ids) == 3
    assert driver.received["late"].finish == TIMEOUT
    driver.run(max_steps=20)
    assert driver.scheduler.load.num_free_blocks == 50


def test_the_deadlines_of_ended_requests_hide_none_of_the_others() -> None:
    driver = make_driver(max_num_seqs=4)
    for key, deadline in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        driver.add(key, [1, 2], greedy(50), deadline=deadline)
    driver.abort("a")
    ends = {}
    for now in (0.5, 1.5, 2.0, 2.5, 3.0):
        driver.end_late(now)
        for key in "bc":
            if driver.received[key].finish == TIMEOUT:
                ends.setdefault(key, now)
    assert ends == {"c": 2.0, "b": 3.0}
    assert not driver.scheduler.has_requests


def test_those_that_wait_can_be_ended_alone() -> None:
    driver = make_driver(max_num_seqs=1)
    for key in ("runs", "waits", "waits too"):
        driver.add(key, [1, 2, 3], greedy(5))
    driver.step()
    error = ValueError("elsewhere")
    ended = driver.scheduler.fail_all(error, running=False)
    assert [output.request.key for output in ended] == ["waits", "waits too"]
    assert {output.finish for output in ended} == {Finish(FinishReason.ERROR, error=error)}
    driver.run(max_steps=10)
    assert driver.received["runs"].finish == Finish(FinishReason.LENGTH)
