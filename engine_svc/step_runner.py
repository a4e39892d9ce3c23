"""Steps on their way through the executor: launched, waited for in order, timed and watched."""

import logging
import time
from collections import deque
from contextlib import suppress
from typing import Final, NamedTuple, Never, Protocol

from engine_svc.planning.errors import ComputeLost
from engine_svc.planning.step import PendingStep, StepPlan, StepResult
from engine_svc.step_watchdog import StepWatchdog

logger = logging.getLogger(__name__)

# A step may fail for its requests' sake; this many in a row mean that nothing works any more.
_MAX_FAILED_STEPS_IN_A_ROW: Final = 3


class Executor(Protocol):
    """The compute half of the engine, as this half sees it."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_steps_in_flight(self) -> int:
        """How many steps may be launched before the first of them is waited for: 1 or 2."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step, or computes it whole where it would not run beside Python anyway.

        After an exception here or from `wait` the rows of the plan hold nothing of use; after
        ComputeLost nothing does.
        """


class LandedStep(NamedTuple):
    """`result` is None when the step failed; `seconds` is the step's own time."""

    plan: StepPlan
    result: StepResult | None
    seconds: float


class _NotLaunched(NamedTuple):
    """The pending step of a launch that failed."""

    error: Exception

    def wait(self) -> Never:
        raise self.error


class StepRunner:
    """Runs up to `max_in_flight` steps of an executor at once. Used by the engine's thread."""

    def __init__(self, executor: Executor, max_in_flight: int, watchdog: StepWatchdog) -> None:
        assert max_in_flight <= executor.max_steps_in_flight
        self._executor = executor
        self._max_in_flight = max_in_flight
        self._watchdog = watchdog
        # (plan, its pending step, when it was launched), in that order.
        self._in_flight: deque[tuple[StepPlan, PendingStep, float]] = deque()
        self._last_landing = 0.0
        self._num_failed_in_a_row = 0

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    @property
    def may_launch(self) -> bool:
        """Not before `land`, when enough steps are in flight or the last one could not begin."""
        in_flight = self._in_flight
        if not in_flight:
            return True
        return len(in_flight) < self._max_in_flight and type(in_flight[-1][1]) is not _NotLaunched

    def launch(self, plan: StepPlan) -> None:
        """Begins a step. When that fails, `land` says so in the step's turn."""
        began = time.perf_counter()
        pending: PendingStep
        self._watchdog.plan = plan
        try:
            pending = self._executor.launch(plan)
        except Exception as error:
            pending = _NotLaunched(error)
        finally:
            self._watchdog.plan = None
        self._in_flight.append((plan, pending, began))

    def land(self) -> LandedStep:
        """Waits for the oldest step in flight, of which there is one.

        If it failed, what was launched after it comes to nothing, and is waited for here as well.
        Raises when the executor says that it is of no use any more, or so many failed in a row.
        """
        plan, pending, launched = self._in_flight.popleft()
        try:
            result = self._wait(plan, pending)
        except ComputeLost:
            raise
        except Exception:
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= _MAX_FAILED_STEPS_IN_A_ROW:
                raise
            logger.exception("a step failed; its %d requests end", len(plan.steps))
            self._drop_later_ones()
            return LandedStep(plan, None, 0.0)
        self._num_failed_in_a_row = 0
        now = time.perf_counter()
        # On the device it began when the one before it had ended.
        began = launched if launched > self._last_landing else self._last_landing
        self._last_landing = now
        return LandedStep(plan, result, now - began)

    def _wait(self, plan: StepPlan, pending: PendingStep) -> StepResult:
        self._watchdog.plan = plan
        try:
            return pending.wait()
        finally:
            self._watchdog.plan = None

    def _drop_later_ones(self) -> None:
        while self._in_flight:
            plan, pending, _ = self._in_flight.popleft()
            # It builds on what was not computed, whether it noticed or not.
            with suppress(Exception):
                self._wait(plan, pending)
