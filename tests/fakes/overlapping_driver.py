"""Drives a scheduler and an executor with two steps in flight, as the engine's loop does."""

import math
from collections import Counter
from collections.abc import Callable

from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.step import StepPlan
from engine_svc.step_runner import Executor, StepRunner
from engine_svc.step_watchdog import StepWatchdog
from tests.fakes.overlapping_executor import StepFailed
from tests.fakes.scheduler_driver import SchedulerDriver


class OverlappingDriver(SchedulerDriver):
    """A step of its is a turn of the loop: something is launched or landed, mostly both."""

    def __init__(self, config: SchedulerConfig, executor: Executor) -> None:
        def execute(plan: StepPlan) -> None:
            raise AssertionError("steps are launched")

        super().__init__(config, execute)  # type: ignore[arg-type]
        self.config = config
        self.runner = StepRunner(executor, config.max_steps_in_flight, StepWatchdog(math.inf))
        self._in_flight: list[StepPlan] = []

    def step(self, while_executing: Callable[[], None] = lambda: None) -> StepPlan | None:
        """Returns what was launched; `while_executing` is called before the oldest step lands."""
        plan = self.launch()
        while_executing()
        if plan is None or not self.runner.may_launch:
            self.land()
        return plan

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule() if self.runner.may_launch else None
        if plan is not None:
            self.plans.append(plan)
            self._take(self.scheduler.first_starts(plan))
            self.check(plan)
            self._in_flight.append(plan)
            self.runner.launch(plan)
        return plan

    def land(self) -> None:
        plan, result, seconds = self.runner.land()
        assert plan is self._in_flight[0]
        if result is None:
            rows = {step.row for each in self._in_flight for step in each.steps}
            self.failed |= {key for key, request in self.requests.items() if request.row in rows}
            self._in_flight.clear()
            self._take(self.scheduler.fail(plan, StepFailed("a step in flight")))
        else:
            del self._in_flight[0]
            self._take(self.scheduler.commit(plan, result, seconds))

    def run(self, max_steps: int) -> int:
        num_steps = super().run(max_steps)
        self.land_all()
        return num_steps

    def land_all(self) -> None:
        while not self.runner.is_idle:
            self.land()

    def check(self, plan: StepPlan) -> None:
        """The limits, and that all blocks are free or somebody's."""
        config = self.config
        assert 0 < len(plan.steps) <= config.max_num_seqs
        assert 0 < plan.num_scheduled_tokens <= config.max_num_batched_tokens
        with_row = [request for request in self.requests.values() if request.row is not None]
        assert len({request.row for request in with_row}) == len(with_row)
        holders = Counter(b for request in with_row for b in set(request.block_ids))
        assert self.scheduler.load.num_free_blocks == config.num_blocks - len(holders)
