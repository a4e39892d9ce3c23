"""What the processes of a line hold: tasks, threads, file descriptors, memory."""

import asyncio
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from tests.chaos.line import ChaosLine, Replica

_ANSWER_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01


@dataclass(frozen=True)
class Footprint:
    """Of one process. `tasks` counts asyncio tasks by the name of their coroutine."""

    tasks: Counter[str]
    num_threads: int
    num_files: int
    resident_mib: float

    @property
    def num_tasks(self) -> int:
        return self.tasks.total()


async def footprints(line: ChaosLine) -> dict[str, Footprint]:
    """By replica."""
    found = await asyncio.gather(
        *(_footprint(replica, line.probe_directory) for replica in line.all_replicas)
    )
    return {
        replica.name: footprint for replica, footprint in zip(line.all_replicas, found, strict=True)
    }


async def _footprint(replica: Replica, directory: Path) -> Footprint:
    process = psutil.Process(replica.process.pid)
    return Footprint(
        Counter() if replica.service == "redis" else await _tasks(replica, directory),
        process.num_threads(),
        process.num_fds(),
        process.memory_info().rss / (1 << 20),
    )


async def _tasks(replica: Replica, directory: Path) -> Counter[str]:
    path = directory / str(replica.process.pid)
    path.unlink(missing_ok=True)
    replica.process.send(signal.SIGUSR2)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{replica.name} does not say what tasks it has")
        await asyncio.sleep(_POLL_SECONDS)
    lines = (line.partition(" ") for line in path.read_text().splitlines())
    return Counter({name: int(count) for count, _, name in lines})
