"""Ops that `Kernels.capture` recorded, as whoever runs them sees them."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class CapturedRun(Protocol):
    """Run as one."""

    @property
    def result(self) -> Tensor:
        """Where the result comes to lie, for the most rows."""

    def __call__(self, *counts: int) -> None:
        """Runs the ops with so many rows of each count."""

    def set_profiling(self, is_on: bool) -> None:
        """Begins to add up the time of each op, from zero, or ends it."""

    def op_seconds(self) -> Mapping[str, float]:
        """Of all runs since profiling began, by kind of op."""
