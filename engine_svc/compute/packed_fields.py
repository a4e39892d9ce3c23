"""Arrays of several types laid out in one piece of memory, so that one copy carries them all."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Of pointers, Triton's kernels are compiled for multiples of 16 bytes; a line of cache has 64.
_ALIGNMENT = 64
_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}

# The type of a field's elements, int32, int64 or float32, and its shape.
Field = tuple[type[np.generic] | np.dtype, tuple[int, ...]]


class PackedFields:
    """Where each of some fields lies in memory that begins at a multiple of 64 bytes."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._places: list[tuple[int, int, np.dtype, tuple[int, ...]]] = []
        end = 0
        for dtype, shape in fields:
            dtype = np.dtype(dtype)
            first = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = first + math.prod(shape) * dtype.itemsize
            self._places.append((first, end, dtype, shape))
        self.num_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT

    def on_host(self, memory: np.ndarray) -> list[np.ndarray]:
        """The fields as views of `memory`, uint8 [at least num_bytes]."""
        return [
            memory[first:end].view(dtype).reshape(shape)
            for first, end, dtype, shape in self._places
        ]

    def on_device(self, memory: Tensor) -> list[Tensor]:
        """The same of a tensor, uint8 [at least num_bytes], on any device."""
        return [
            memory[first:end].view(_TORCH_TYPES[kind]).view(shape)
            for first, end, kind, shape in self._places
        ]


def fields_of(arrays: Sequence[np.ndarray]) -> PackedFields:
    """The layout that holds such arrays."""
    return PackedFields([(array.dtype, array.shape) for array in arrays])
