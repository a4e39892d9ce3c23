"""What weights are once they are packed: matrices in the native library's formats, and a bias."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from torch import Tensor

from kernels.cpu.library import Matrix
from kernels.cpu.weight_store import Piece


class Format(IntEnum):
    """TlFormat: what a packed matrix holds."""

    Q4 = 0
    Q4_WIDE = 1
    Q8 = 2
    F16 = 3
    BF16 = 4
    F32 = 5


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """What a TlMatrix points at, which is settled once `kept_on_disk` is left."""

    format: Format
    rows: int
    columns: int
    piece: Piece

    @property
    def data(self) -> np.ndarray:
        """uint8 [bytes], at a multiple of 64 bytes."""
        return self.piece.data

    def structure(self, bias: int | None = None) -> Matrix:
        """The TlMatrix; `bias` is an address. It and `self` must outlive what reads it."""
        return Matrix(self.format, self.rows, self.columns, self.data.ctypes.data, bias)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A linear layer's weight and bias. Its outputs are those of the matrices, one after another:
    parts of a file's different types cannot be in one."""

    matrices: tuple[PackedMatrix, ...]
    bias: Tensor | None  # float32 [rows]

    @property
    def rows(self) -> int:
        return sum(matrix.rows for matrix in self.matrices)

    @property
    def columns(self) -> int:
        return self.matrices[0].columns

    @property
    def num_bytes(self) -> int:
        return sum(matrix.data.nbytes for matrix in self.matrices)

    def structures(self) -> list[tuple[int, Matrix]]:
        """The first output and the TlMatrix of each matrix."""
        result, first = [], 0
        for matrix in self.matrices:
            address = None if self.bias is None else self.bias[first:].data_ptr()
            result.append((first, matrix.structure(address)))
            first += matrix.rows
        return result
