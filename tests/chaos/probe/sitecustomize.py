"""Lets a service say on SIGUSR2, into $CHAOS_PROBE/PID, how many asyncio tasks it has.

Python imports a module of this name by itself, from a directory on PYTHONPATH.
"""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from types import FrameType


def _tell(number: int, frame: FrameType | None) -> None:
    """Runs on the main thread, between two steps of its event loop's callbacks."""
    counted = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    path = Path(os.environ["CHAOS_PROBE"]) / str(os.getpid())
    written = path.with_suffix(".new")
    written.write_text("\n".join(f"{count} {name}" for name, count in counted.items()))
    # Whoever waits for the file finds it whole.
    written.rename(path)


if "CHAOS_PROBE" in os.environ:
    signal.signal(signal.SIGUSR2, _tell)
