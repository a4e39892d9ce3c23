"""Tells a step that hangs from one that is slow."""

import asyncio
from typing import Final

from engine_svc.planning.step import StepPlan

_CHECKS_PER_TIMEOUT: Final = 20
_LONGEST_CHECK_SECONDS: Final = 5.0


class StepHangs(Exception):
    """A step does not end. The message says what it computes."""


class StepWatchdog:
    """Looked at by the event loop. timeout_seconds: of a step.

    The engine's thread sets `plan` while a step is computed or waited for, and None in between.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self.plan: StepPlan | None = None
        self.has_bitten = False

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
            seconds = seconds + interval if plan is self.plan else 0.0
            plan = self.plan
        self.has_bitten = True
        return (
            f"a step of {len(plan.steps)} sequences and {plan.num_scheduled_tokens} tokens, "
            f"{len(plan.starts)} of them new, has not ended for {self._timeout_seconds:g} s"
        )
