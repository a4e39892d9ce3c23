"""Activations of a program that is being recorded: buffers, which have no memory yet."""

import math
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_COLUMNS = 32
_ALIGNMENT = 64
# Floats: more than any program needs.
_SPACE = 1 << 44


@dataclass(eq=False, slots=True)
class Buffer:
    """Rows of activations that one op writes. Who reads them decides in which forms: as floats,
    or quantised in groups of 32 columns, with one byte a column or two."""

    count: int
    num_rows: int  # the most
    width: int
    halves: int
    has_values: bool = False
    is_quantised: bool = False
    # Set at last: where each form begins.
    values: int = 0
    quantised: int = 0
    scales: int = 0
    sums: int = 0

    @property
    def _num_groups(self) -> int:
        return -(-self.width // GROUP_COLUMNS)

    @property
    def values_bytes(self) -> int:
        return _align(self.num_rows * self.width * 4) if self.has_values else 0

    @property
    def _quantised_bytes(self) -> int:
        return _align(self.num_rows * self._num_groups * GROUP_COLUMNS * self.halves)

    @property
    def num_bytes(self) -> int:
        """Of all its forms."""
        num_bytes = self.values_bytes
        if self.is_quantised:
            num_groups = self.num_rows * self._num_groups
            num_bytes += self._quantised_bytes + 2 * _align(num_groups * 4)
        return num_bytes

    def place(self, address: int) -> None:
        """Gives it memory: `num_bytes` from `address`, a multiple of 64."""
        if self.has_values:
            self.values = address
        if self.is_quantised:
            num_groups = self.num_rows * self._num_groups
            self.quantised = address + self.values_bytes
            self.scales = self.quantised + self._quantised_bytes
            self.sums = self.scales + _align(num_groups * 4)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Some columns of the rows of a buffer, or of a tensor that was there before."""

    owner: Buffer | Tensor
    first_column: int
    width: int
    stride: int

    @classmethod
    def of(cls, buffer: Buffer) -> "Span":
        return cls(buffer, 0, buffer.width, buffer.width)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of a buffer."""
        return isinstance(self.owner, Buffer) and self.width == self.owner.width

    @property
    def buffer(self) -> Buffer | None:
        return self.owner if isinstance(self.owner, Buffer) else None

    @property
    def address(self) -> int:
        """Of the floats, once there is memory."""
        first = self.owner.values if isinstance(self.owner, Buffer) else self.owner.data_ptr()
        return first + 4 * self.first_column


class BufferSpace:
    """Hands out buffers as tensors without memory, of which torch makes views as of others.

    They all lie in one tensor of the device `meta`, so that where a view begins says whose it is.
    Quantised, they have so many `halves`, as TlRows says.
    """

    def __init__(self, halves: int) -> None:
        self._halves = halves
        self._space = torch.empty(_SPACE, device="meta")
        self._buffers: list[Buffer] = []
        self._firsts: list[int] = []
        self._end = 0

    def new(self, count: int, num_rows: int, width: int) -> Tensor:
        """[num_rows, width]."""
        self._buffers.append(Buffer(count, num_rows, width, self._halves))
        self._firsts.append(self._end)
        size = num_rows * width
        rows = self._space[self._end : self._end + size].view(num_rows, width)
        self._end += size
        return rows

    def span(self, tensor: Tensor) -> Span:
        """What a view of a buffer, or any other tensor, [rows, …] consists of; rows are whole."""
        width = 1
        for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
            assert size == 1 or stride == width, "the columns of a row are not one after another"
            width *= size
        if not tensor.is_meta:
            assert tensor.dtype == torch.float32, "native kernels compute in float32"
            return Span(tensor, 0, width, tensor.stride(0))
        index = bisect_right(self._firsts, tensor.storage_offset()) - 1
        buffer = self._buffers[index]
        column = tensor.storage_offset() - self._firsts[index]
        assert column + width <= buffer.width, "a view does not keep rows whole"
        return Span(buffer, column, width, buffer.width)

    def buffer(self, tensor: Tensor) -> Buffer:
        """That of which `tensor` is a view of all columns."""
        span = self.span(tensor)
        assert span.buffer is not None and span.is_whole, "not all of one op's result"
        return span.buffer


def _align(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
