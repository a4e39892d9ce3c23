"""Where a model computes, as the host sees it: a CUDA device, or the CPU in the place of one.

Work for a device is queued in order and done later; the host goes on. What it reads or writes is in
pinned memory, and a `Mark` says when the device has come so far. On the CPU all is done at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.graph_rehearsal import RehearsedGraph, RepeatedRun
from engine_svc.compute.packed_fields import fields_of


class Mark(Protocol):
    """A place in the queue of a device's work."""

    def synchronize(self) -> None:
        """Waits until all that was queued before it is done; raises if that failed."""


class StepGraph(Protocol):
    """Ops that were captured: the same kernels on the same addresses, queued as one."""

    def replay(self) -> None: ...


class DeviceMemory(NamedTuple):
    """Bytes. What is neither free nor reserved is taken by others, or by the driver."""

    total: int
    free: int
    reserved: int  # by torch, in use or not
    peak: int  # the most that torch had in use since `forget_peak`


class Device(Protocol):
    """Used by one thread, inside `computing()`."""

    torch_device: torch.device
    # Whether it has memory of its own, which is measured while the largest step runs.
    has_own_memory: bool

    def computing(self) -> AbstractContextManager[None]:
        """Everything inside is queued on the device, in order, and in torch's inference mode."""

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the host, which copies to the device need not wait for."""

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Arrays of int32, int64 or float32 on the device, by one copy. They may change at once."""

    def download(self, tensor: Tensor) -> Tensor:
        """On the host, once a mark made from now on is reached."""

    def mark(self) -> Mark: ...

    def capture(self, run: Callable[[], None]) -> StepGraph:
        """Captures the ops of `run`, which has run before. It may not wait for the device, nor
        allocate, nor have shapes that depend on data."""

    def memory(self) -> DeviceMemory: ...

    def forget_peak(self) -> None:
        """Gives back what is reserved and not in use, too."""


class CudaDevice:
    """One CUDA device with a stream of ours. Its graphs share one pool of memory."""

    has_own_memory = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._stream = torch.cuda.Stream(torch_device)
        self._graph_pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            yield

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        # Torch keeps the pinned memory, for its next user, until the copy is done.
        fields = fields_of(arrays)
        memory = self.pinned(fields.num_bytes)
        _write(fields.on_host(memory.numpy()), arrays)
        return fields.on_device(memory.to(self.torch_device, non_blocking=True))

    def download(self, tensor: Tensor) -> Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return result.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return event

    def capture(self, run: Callable[[], None]) -> StepGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.torch_device)
        # Not torch.cuda.graph, which collects garbage each time: seconds, over a ladder of sizes.
        # Other threads of the process may go on, as far as they leave the device alone.
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
        return graph

    def memory(self) -> DeviceMemory:
        torch.cuda.synchronize(self.torch_device)
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(
            total,
            free,
            torch.cuda.memory_reserved(self.torch_device),
            torch.cuda.max_memory_allocated(self.torch_device),
        )

    def forget_peak(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)


class _Reached:
    def synchronize(self) -> None:
        """The CPU has done what it was asked."""


class HostDevice:
    """The CPU, for kernels that are made for a device: a rehearsal, and tests.

    With `checks_graphs` what is captured is held to the rules of a capture, each time it runs.
    """

    torch_device = torch.device("cpu")
    has_own_memory = False

    def __init__(self, *, checks_graphs: bool) -> None:
        self._checks_graphs = checks_graphs

    def computing(self) -> AbstractContextManager[None]:
        return torch.inference_mode()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        fields = fields_of(arrays)
        memory = self.pinned(fields.num_bytes)
        _write(fields.on_host(memory.numpy()), arrays)
        return fields.on_device(memory)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def mark(self) -> Mark:
        return _Reached()

    def capture(self, run: Callable[[], None]) -> StepGraph:
        return RehearsedGraph(run) if self._checks_graphs else RepeatedRun(run)

    def memory(self) -> DeviceMemory:
        raise AssertionError("the host's memory is not the device's own")

    def forget_peak(self) -> None:
        """Nothing is measured."""


def _write(views: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> None:
    for view, array in zip(views, arrays, strict=True):
        view[...] = array
