"""Ranks that are threads of one process, and start at once; one runs while the others wait."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine_svc.compute.ranks import Ranks

ResultT = TypeVar("ResultT")
PATIENCE_SECONDS = 60.0


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_SECONDS)
        self.values: list[Any] = [None] * size
        # Triton's interpreter serves one thread at a time.
        self.turn = threading.Lock()


class ThreadRank:
    """A `Ranks` of engine_svc/compute/ranks.py."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        first, *others = self._exchange(tensor)
        total = first.clone()
        for other in others:
            total += other
        return tensor.copy_(total)

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).amax(dim=0))

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor))

    def least(self, number: int) -> int:
        return min(self._exchange(number))

    def _exchange(self, value: Any) -> list[Any]:
        """What each has; copies, since its owner may go on to change it."""
        meeting = self._meeting
        meeting.values[self.rank] = value.clone() if isinstance(value, Tensor) else value
        meeting.turn.release()
        try:
            meeting.barrier.wait()
            values = list(meeting.values)
            meeting.barrier.wait()
        finally:
            meeting.turn.acquire()
        return values


def run_ranks(size: int, work: Callable[[Ranks], ResultT]) -> list[ResultT]:
    """What `work` gives on each of so many ranks. Raises the first error of any."""
    meeting = _Meeting(size)

    def run(rank: int) -> ResultT:
        try:
            with meeting.turn:
                return work(ThreadRank(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        # The others only say that they waited in vain.
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
