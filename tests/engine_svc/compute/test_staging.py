"""A step's way to the device: fields in one piece of memory, written anew when they may be."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_svc.compute.devices import HostDevice
from engine_svc.compute.packed_fields import PackedFields, fields_of
from engine_svc.compute.staging import StagingMemory

TYPES = st.sampled_from([np.int32, np.int64, np.float32])
SHAPES = st.one_of(st.tuples(st.integers(0, 40)), st.tuples(st.integers(0, 5), st.integers(0, 9)))


@given(fields=st.lists(st.tuples(TYPES, SHAPES), max_size=8))
def test_fields_arrive_whole_whatever_their_types_and_sizes(fields) -> None:
    generator = np.random.default_rng(0)
    arrays = [generator.integers(-1000, 1000, shape).astype(kind) for kind, shape in fields]
    packed = PackedFields(fields)
    assert packed.num_bytes == fields_of(arrays).num_bytes
    memory = torch.zeros(packed.num_bytes + 64, dtype=torch.uint8)
    for view, array in zip(packed.on_host(memory.numpy()), arrays, strict=True):
        view[...] = array
    for tensor, array in zip(packed.on_device(memory), arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        # Kernels read sixteen bytes at once.
        assert not array.size or (tensor.data_ptr() - memory.data_ptr()) % 64 == 0


class NotingDevice(HostDevice):
    """Notes the marks that are made, by number, and waited for."""

    def __init__(self) -> None:
        super().__init__(checks_graphs=False)
        self.num_marks = 0
        self.waited_for: list[int] = []

    def mark(self):  # type: ignore[no-untyped-def]
        return _NotedMark(self)


class _NotedMark:
    def __init__(self, device: NotingDevice) -> None:
        self._device = device
        self._number = device.num_marks
        device.num_marks += 1

    def synchronize(self) -> None:
        self._device.waited_for.append(self._number)


def test_memory_is_written_again_only_when_its_copy_is_done_and_the_device_s_never_moves() -> None:
    device = NotingDevice()
    memory = StagingMemory(device, 128)
    address = memory.on_device.data_ptr()
    for step in range(5):
        view = memory.next()
        # Two buffers: the one before may still be on its way.
        assert device.waited_for == list(range(step - 1))
        view[:] = step
        memory.send(64)
        assert memory.on_device[:64].tolist() == [step] * 64
        assert memory.on_device[64:].tolist() == [0] * 64
    assert memory.on_device.data_ptr() == address
