"""Records ops and makes of them one program of the native library, which runs in one call."""

import weakref
from collections.abc import Mapping, Sequence
from ctypes import CDLL, c_double, c_int64

import torch
from torch import Tensor

from kernels.cpu.native_buffers import Buffer, BufferSpace, Span
from kernels.cpu.native_fusion import fuse, lifetimes, settle_forms
from kernels.cpu.native_ops import Lowering, Op

# TL_NUM_COUNTS.
_NUM_COUNTS = 4
_INTEGERS = (torch.int32, torch.int64)


class NativePool:
    """The threads that programs run on."""

    def __init__(self, library: CDLL, num_threads: int) -> None:
        self.library = library
        self.handle = library.tl_pool_new(num_threads)
        weakref.finalize(self, library.tl_pool_delete, self.handle)


class Recorder:
    """Takes down ops. With `counted`, as `Kernels.capture` has it, tensors' rows go by those
    counts; without, tensors of equal lengths have a count, which is that length. What is quantised
    has so many `halves`, as TlRows says."""

    def __init__(self, halves: int, counted: Sequence[Sequence[Tensor]] | None = None) -> None:
        self.halves = halves
        self.ops: list[Op] = []
        self._space = BufferSpace(halves)
        self._is_capturing = counted is not None
        # By address of a tensor, or by length.
        self._counts = {
            tensor.data_ptr(): count
            for count, tensors in enumerate(counted or ())
            for tensor in tensors
        }
        # The program holds their addresses alone.
        self.kept_alive: list[Tensor] = []

    @property
    def lengths(self) -> list[int]:
        """What each count is when it is not told: without `counted`."""
        return list(self._counts)

    def integers(self, tensor: Tensor) -> Tensor:
        """Ids, indices or positions as the library reads them, int32 one after another."""
        assert tensor.dtype in _INTEGERS
        if self._is_capturing:
            assert tensor.dtype == torch.int32, "only int32 tensors can be read in every run"
        result = tensor.to(torch.int32).contiguous()
        self.kept_alive.append(result)
        return result

    def count(self, rows: Tensor) -> int:
        """The count of a tensor's rows."""
        if rows.is_meta:
            buffer = self.span(rows).buffer
            assert buffer is not None
            return buffer.count
        if self._is_capturing:
            return self._counts[rows.data_ptr()]
        return self._counts.setdefault(len(rows), len(self._counts))

    def span(self, tensor: Tensor) -> Span:
        self.kept_alive.append(tensor)
        return self._space.span(tensor)

    def buffer(self, tensor: Tensor) -> Buffer:
        return self._space.buffer(tensor)

    def new(self, count: int, num_rows: int, width: int) -> tuple[Tensor, Buffer]:
        """A result, [num_rows, width]."""
        tensor = self._space.new(count, num_rows, width)
        return tensor, self._space.buffer(tensor)


class NativeProgram:
    """What a recorder took down, to run as often as one likes; see `kernels.CapturedRun`."""

    def __init__(self, pool: NativePool, recorder: Recorder, result: Tensor) -> None:
        self._pool = pool
        self._library = library = pool.library
        self._kept_alive = recorder.kept_alive
        self.result = result
        buffer = None
        if result.is_meta:
            buffer = recorder.buffer(result)
            self.result = torch.empty(result.shape)
        ops = settle_forms(fuse(recorder.ops, buffer), buffer, recorder.halves)
        self._arena = _place_buffers(ops, buffer, self.result)
        self._program = library.tl_program_new()
        weakref.finalize(self, library.tl_program_delete, self._program)
        lowering = Lowering(library, self._program)
        for op in ops:
            op.add(lowering)
        self._labels = lowering.labels
        self._ops = ops
        self._counts = (c_int64 * _NUM_COUNTS)()

    def __call__(self, *counts: int) -> None:
        self._counts[: len(counts)] = counts
        self._library.tl_program_run(self._program, self._pool.handle, self._counts)

    def set_profiling(self, is_on: bool) -> None:
        self._library.tl_program_set_profiling(self._program, int(is_on))

    def op_seconds(self) -> Mapping[str, float]:
        seconds = (c_double * len(self._labels))()
        self._library.tl_program_profile(self._program, seconds)
        result: dict[str, float] = {}
        for label, spent in zip(self._labels, seconds, strict=True):
            result[label] = result.get(label, 0.0) + spent
        return result


def _place_buffers(ops: Sequence[Op], result: Buffer | None, memory: Tensor) -> Tensor:
    """Gives every buffer its memory: `memory` to the result, to the others parts of one tensor,
    in turns where no op needs both. Returns that tensor."""
    taken: list[tuple[int, int, int]] = []  # begin, end, last op; by begin
    places: list[tuple[Buffer, int]] = []
    size = 0
    for buffer, (first_op, last_op) in lifetimes(ops).items():
        if buffer is result and not buffer.is_quantised:
            continue
        taken = [place for place in taken if place[2] >= first_op]
        begin = 0
        for other_begin, other_end, _ in taken:
            if begin + buffer.num_bytes <= other_begin:
                break
            begin = max(begin, other_end)
        taken = sorted([*taken, (begin, begin + buffer.num_bytes, last_op)])
        places.append((buffer, begin))
        size = max(size, begin + buffer.num_bytes)
    arena = torch.empty(max(size, 1), dtype=torch.uint8)
    for buffer, begin in places:
        buffer.place(arena.data_ptr() + begin)
    if result is not None:
        result.values = memory.data_ptr()
    return arena
