"""Tells a step that hangs from one that is slow."""

import asyncio
from types import TracebackType
from typing import Final, Self

from engine_svc.planning.step import StepPlan

_CHECKS_PER_TIMEOUT: Final = 20
_LONGEST_CHECK_SECONDS: Final = 5.0


class StepHangs(Exception):
    """A step does not end. The message says what it computes."""


class StepWatchdog:
    """Set by the engine's thread, looked at by the event loop. timeout_seconds: of a step."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._plan: StepPlan | None = None
        self.has_bitten = False

    def watching(self, plan: StepPlan) -> Self:
        """For a `with` block: while the step is computed, or waited for."""
        self._plan = plan
        return self

    def __enter__(self) -> None:
        """`watching` began it, without a generator: this is done in every step."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._plan = None

    async def wait_for_hang(self) -> str:
        """Returns, when a step has taken too long, what it is.

        Time is counted in checks, not taken from a clock: in a process that was stopped for an
        hour, no step has taken an hour.
        """
        interval = min(self._timeout_seconds / _CHECKS_PER_TIMEOUT, _LONGEST_CHECK_SECONDS)
        plan: StepPlan | None = None
        seconds = 0.0
        while plan is None or seconds < self._timeout_seconds:
            await asyncio.sleep(interval)
            seconds = seconds + interval if plan is self._plan else 0.0
            plan = self._plan
        self.has_bitten = True
        return (
            f"a step of {len(plan.steps)} sequences and {plan.num_scheduled_tokens} tokens, "
            f"{len(plan.starts)} of them new, has not ended for {self._timeout_seconds:g} s"
        )
