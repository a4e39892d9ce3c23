"""The ranks that compute one model together, and what they tell each other in the middle of a step.

Tensor parallelism over torch.distributed: NCCL between CUDA devices, Gloo between processes that
compute on the CPU, and for what hosts agree on.
"""

import os
import socket
from datetime import timedelta
from typing import Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# A collective within a step may wait for a step's time; the engine ends a step that hangs sooner.
_TIMEOUT: Final = timedelta(minutes=30)
_MEETING_TIMEOUT: Final = timedelta(minutes=2)
_LOOPBACK: Final = "127.0.0.1"


class Ranks(Protocol):
    """This process among those that compute one model.

    All ranks call the same methods in the same order, with tensors of the same shapes and types.
    RuntimeError where another one is gone.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Adds up what the ranks have, in place; all get the same bits. Returns `tensor`."""

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        """The largest of what the ranks have, in place. No NaN may be among it."""

    def gather(self, tensor: Tensor) -> Tensor:
        """What each rank has, in their order: [size, *shape]."""

    def least(self, number: int) -> int:
        """The least of the ranks' numbers, on the host; so it is also where all meet."""


class OneRank:
    """A process that has the whole model to itself."""

    rank = 0
    size = 1

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]

    def least(self, number: int) -> int:
        return number


ONE_RANK: Final[Ranks] = OneRank()


class RankPlace(NamedTuple):
    """Where a rank belongs. `port`, of the loopback address, is where ranks find each other."""

    rank: int
    size: int
    port: int


class ProcessRanks:
    """This process among several, by torch's default process group.

    sums_in_order: floats are added in the order of ranks. Otherwise NCCL adds them in an order that
    depends on their places, so that with more than two ranks a row's last bits depend on the batch.
    """

    def __init__(
        self, rank: int, size: int, hosts: dist.ProcessGroup | None, *, sums_in_order: bool
    ) -> None:
        self.rank = rank
        self.size = size
        self._hosts = hosts
        # Two numbers have one sum.
        self._sums_in_order = sums_in_order and size > 2

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        if not self._sums_in_order or not tensor.is_floating_point():
            dist.all_reduce(tensor)
            return tensor
        first, *others = self.gather(tensor)
        total = first.float()
        for other in others:
            total.add_(other)
        return tensor.copy_(total)

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather(list(gathered.unbind()), tensor.contiguous())
        return gathered

    def least(self, number: int) -> int:
        agreed = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._hosts)
        return int(agreed)

    def leave(self) -> None:
        """Frees what connects it to the others; it may be one of other ranks then."""
        dist.destroy_process_group()


def meeting_place() -> socket.socket:
    """Where ranks find each other: it listens on the loopback address only."""
    listener = socket.socket()
    listener.bind((_LOOPBACK, 0))
    listener.listen()
    return listener


def join_ranks(
    place: RankPlace,
    device: torch.device,
    listener: socket.socket | None = None,
    *,
    sums_in_order: bool,
) -> ProcessRanks:
    """Waits for the other ranks; rank 0 has the `listener`. On CUDA `device` is this rank's own."""
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, loopback)
    store = dist.TCPStore(
        _LOOPBACK,
        place.port,
        place.size,
        is_master=listener is not None,
        timeout=_MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=_TIMEOUT,
        # The communicator is made at once: it could not be while a graph is captured.
        device_id=device if is_cuda else None,
    )
    hosts = dist.new_group(backend="gloo", timeout=_TIMEOUT) if is_cuda else None
    return ProcessRanks(place.rank, place.size, hosts, sums_in_order=sums_in_order or not is_cuda)
