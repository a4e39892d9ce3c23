"""Runs single ops of the native library, on torch tensors, in each build that this machine can."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.library import Matrix, Rows, load
from kernels.cpu.native_sampling import NativeSampling

_GROUP = 32
# With two halves, quantised values are 255 · high + low.
_HALF_BASE = 255


@contextmanager
def open_sampling(instruction_set: str, num_threads: int = 1) -> Iterator[NativeSampling]:
    """The sampler's ops of a build, with a pool of their own."""
    library = load(instruction_set)
    pool = library.tl_pool_new(num_threads)
    try:
        yield NativeSampling(library, pool)
    finally:
        library.tl_pool_delete(pool)


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised memory that begins at a multiple of 64 bytes, as torch's always does."""
    result = torch.empty(shape, dtype=dtype)
    assert result.data_ptr() % 64 == 0
    return result


class QuantisedRows:
    """Memory for the quantised form of activations [rows, width].

    `quantised` [rows, halves, groups · 32] holds int8, or the high halves and then the low ones.
    """

    def __init__(self, num_rows: int, width: int, halves: int) -> None:
        groups = -(-width // _GROUP)
        self.quantised = torch.zeros(num_rows, halves, groups * _GROUP, dtype=torch.int8)
        self.scales = torch.zeros(num_rows, groups)
        self.sums = torch.zeros(num_rows, groups)

    def rows(self, values: Tensor | None = None) -> Rows:
        return Rows(
            None if values is None else values.data_ptr(),
            0 if values is None else values.stride(0),
            self.quantised.data_ptr(),
            self.scales.data_ptr(),
            self.sums.data_ptr(),
            self.quantised.shape[1],
        )

    def dequantised(self) -> Tensor:
        whole = self.quantised[:, 0].float()
        if self.quantised.shape[1] == 2:
            whole = _HALF_BASE * whole + self.quantised[:, 1].float()
        groups = whole.unflatten(1, (-1, _GROUP))
        return (groups * self.scales[..., None]).flatten(1)


def plain_rows(values: Tensor) -> Rows:
    """TlRows with values only."""
    return Rows(values.data_ptr(), values.stride(0))


def matrix(kind: int, num_rows: int, columns: int, data: Tensor, bias: Tensor | None) -> Matrix:
    """TlMatrix over packed bytes `data`."""
    return Matrix(
        kind, num_rows, columns, data.data_ptr(), None if bias is None else bias.data_ptr()
    )


class NativeOps:
    """One build, and a pool of threads. A context manager."""

    def __init__(self, instruction_set: str, num_threads: int = 1) -> None:
        self.library = load(instruction_set)
        self.pool = self.library.tl_pool_new(num_threads)

    def __enter__(self) -> "NativeOps":
        return self

    def __exit__(self, *error: Any) -> None:
        self.library.tl_pool_delete(self.pool)

    def run(self, add: Callable[[Any, int], None], *counts: int) -> None:
        """A program of what `add(library, program)` adds, run once with these row counts."""
        program = self.library.tl_program_new()
        try:
            add(self.library, program)
            padded = [*counts, *[0] * (4 - len(counts))]
            self.library.tl_program_run(program, self.pool, (c_int64 * 4)(*padded))
        finally:
            self.library.tl_program_delete(program)
