"""How much of the machine others took while something was measured."""

import time
from collections.abc import Callable

import psutil

# llama.cpp with a thread per core slows down many times when anything else runs: a ratio taken
# beside others would flatter whoever shares better.
MAX_OTHERS_SHARE = 0.04


class OthersWatch:
    """Measures, from its making to `share`, what was used beside the measured processes.

    own_cpu_seconds: the CPU time so far of what is measured, the load generator not included.
    """

    def __init__(self, own_cpu_seconds: Callable[[], float]) -> None:
        self._own_cpu_seconds = own_cpu_seconds
        self._began = time.monotonic()
        self._busy, self._own = self._now()

    def share(self) -> float:
        """Of all cores' time, what others took; 0.04 is 4 % of the machine."""
        busy, own = self._now()
        others = (busy - self._busy) - (own - self._own)
        whole = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        return max(0.0, others / whole)

    def _now(self) -> tuple[float, float]:
        machine = psutil.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # Guests' time is part of the user time already.
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        generator = psutil.Process().cpu_times()
        own = self._own_cpu_seconds() + generator.user + generator.system
        return sum(machine) - idle - guests, own
