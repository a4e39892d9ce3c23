"""Pinned memory on the host that a step is written into, and its copy on the device."""

import numpy as np

from engine_svc.compute.devices import Device, Mark

# One is written while the copy of the other may still be under way.
_NUM_BUFFERS = 2


class StagingMemory:
    """`on_device` uint8 [num_bytes], always at the same address, which graphs read.

    A copy is queued behind the work that reads the former contents, so one such memory is enough
    on the device, however many steps are under way.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.on_device = device.pinned(num_bytes).to(device.torch_device)
        self.on_device.zero_()
        self._pinned = [device.pinned(num_bytes) for _ in range(_NUM_BUFFERS)]
        self._arrays = [memory.numpy() for memory in self._pinned]
        self._marks: list[Mark | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        return len(self.on_device)

    def next(self) -> np.ndarray:
        """uint8 [num_bytes] to write into until `send`; waits until its last copy is done."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        mark = self._marks[self._turn]
        if mark is not None:
            mark.synchronize()
        return self._arrays[self._turn]

    def send(self, num_bytes: int) -> None:
        """Queues the copy of the first bytes of what `next` gave last."""
        pinned = self._pinned[self._turn]
        self.on_device[:num_bytes].copy_(pinned[:num_bytes], non_blocking=True)
        self._marks[self._turn] = self._device.mark()
