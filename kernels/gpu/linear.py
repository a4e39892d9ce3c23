"""Linear layers and embeddings of any weights: what each part of a matrix is held as, and by what
it is multiplied."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from kernels.config import KernelConfig
from kernels.gpu import gathers, quantised_embedding
from kernels.gpu.dense_linear import DenseMatrix, dense_linear, dense_matrix
from kernels.gpu.linear_tiles import LinearDevice, linear_device
from kernels.gpu.packed_weight import GROUP, CodeFormat, PackedMatrix, pack_matrix
from kernels.gpu.packed_weight import packed_bytes as matrix_bytes
from kernels.gpu.quantised_linear import quantised_linear
from kernels.gpu.split_sum import Scratch
from kernels.gpu.stored_blocks import (
    Codes,
    fp8_codes,
    int8_codes,
    num_stored_rows,
    stored_codes,
    stored_rows,
)
from kernels.stored_matrix import StoredKind, StoredMatrix

_FORMATS = {
    StoredKind.Q4_0: CodeFormat.Q4,
    StoredKind.Q4_1: CodeFormat.Q4_MINIMUM,
    StoredKind.Q4_K: CodeFormat.Q4_WIDE,
    StoredKind.Q8_0: CodeFormat.INT8,
}
# Blocks that are kept as a file has them, by KernelConfig.weights.
_KEPT = {"auto": frozenset(_FORMATS), "int8": frozenset({StoredKind.Q8_0})}
# What other weights are rounded to; where there is nothing, they are dense.
_ROUNDED = {"int8": CodeFormat.INT8, "fp8": CodeFormat.FP8}
_FLOATS = {
    StoredKind.F32: torch.float32,
    StoredKind.F16: torch.float16,
    StoredKind.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight whose outputs are those of the matrices, one after the other.

    `packed(x, out, scratch)` puts x [T, in] weightᵀ + bias into out [T, out_features].
    """

    matrices: tuple[PackedMatrix | DenseMatrix, ...]
    device: LinearDevice
    batch_invariant: bool

    @property
    def out_features(self) -> int:
        return sum(matrix.num_outputs for matrix in self.matrices)

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self.matrices)

    @property
    def gives_float32(self) -> bool:
        """Whether `out` may be float32 whatever x is; cuBLAS gives the type of x."""
        return self.batch_invariant or all(
            isinstance(matrix, PackedMatrix) for matrix in self.matrices
        )

    def __call__(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        first = 0
        for matrix in self.matrices:
            columns = out[:, first : first + matrix.num_outputs]
            if isinstance(matrix, PackedMatrix):
                quantised_linear(x, matrix, columns, scratch, self.device, self.batch_invariant)
            else:
                dense_linear(x, matrix, columns, scratch, self.device, self.batch_invariant)
            first += matrix.num_outputs


@dataclass(frozen=True, slots=True, eq=False)
class PackedEmbedding:
    """A table [rows, width]; `packed(ids, out)` puts its rows `ids` [T] into out [T, width]."""

    matrix: PackedMatrix | DenseMatrix
    device: LinearDevice

    @property
    def width(self) -> int:
        return self.matrix.num_columns

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    def __call__(self, ids: Tensor, out: Tensor) -> None:
        if isinstance(self.matrix, PackedMatrix):
            quantised_embedding.look_up(ids, self.matrix, out)
        else:
            gathers.embedding(ids, self.matrix.weight, out)


def stored_kinds(config: KernelConfig) -> frozenset[StoredKind]:
    """Blocks that `pack_linear` and `pack_embedding` keep as a file has them."""
    return _KEPT.get(config.weights, frozenset())


def packed_bytes(kind: StoredKind, rows: int, columns: int) -> int:
    """Memory that a stored matrix takes once it is packed."""
    return matrix_bytes(_FORMATS[kind], rows, columns)


def activation_dtype(config: KernelConfig) -> torch.dtype:
    """Of what linear layers read and give, and of dense weights."""
    return torch.float32 if config.weights == "float32" else torch.bfloat16


def pack_linear(
    parts: Sequence[Tensor | StoredMatrix],
    bias: Tensor | None,
    config: KernelConfig,
    device: torch.device,
) -> PackedLinear:
    """The rows of `parts`, one below the other, and bias [rows], on the device.

    Parts that follow each other and are held alike become one matrix.
    """
    matrices: list[PackedMatrix | DenseMatrix] = []
    first = 0
    for code_format, group in groupby(parts, lambda part: _format_of(part, config)):
        alike = list(group)
        rows = sum(map(_num_rows, alike))
        own_bias = None if bias is None else bias[first : first + rows]
        matrices.append(_matrix(code_format, alike, own_bias, config, device))
        first += rows
    return PackedLinear(tuple(matrices), linear_device(device), config.batch_invariant)


def pack_embedding(
    part: Tensor | StoredMatrix, config: KernelConfig, device: torch.device
) -> PackedEmbedding:
    """A table [rows, width] on the device."""
    matrix = _matrix(_format_of(part, config), [part], None, config, device)
    return PackedEmbedding(matrix, linear_device(device))


def tied_head(embedding: PackedEmbedding, config: KernelConfig) -> PackedLinear:
    """The table as a weight, in the same memory."""
    return PackedLinear((embedding.matrix,), embedding.device, config.batch_invariant)


def _format_of(part: Tensor | StoredMatrix, config: KernelConfig) -> CodeFormat | None:
    if isinstance(part, StoredMatrix):
        if part.kind in stored_kinds(config):
            return _FORMATS[part.kind]
        columns = part.columns
    else:
        columns = part.shape[1]
    return None if columns % GROUP else _ROUNDED.get(config.weights)


def _matrix(
    code_format: CodeFormat | None,
    parts: Sequence[Tensor | StoredMatrix],
    bias: Tensor | None,
    config: KernelConfig,
    device: torch.device,
) -> PackedMatrix | DenseMatrix:
    if code_format is None:
        dtype = activation_dtype(config)
        weights = [_floats(part).to(device, dtype) for part in parts]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        return dense_matrix(weight, bias)
    codes = [_codes(part, code_format) for part in parts]
    return pack_matrix(code_format, codes, bias, device)


def _codes(part: Tensor | StoredMatrix, code_format: CodeFormat) -> Codes:
    if isinstance(part, StoredMatrix) and _FORMATS.get(part.kind) is code_format:
        return stored_codes(part)
    weight = _floats(part)
    return int8_codes(weight) if code_format is CodeFormat.INT8 else fp8_codes(weight)


def _floats(part: Tensor | StoredMatrix) -> Tensor:
    if isinstance(part, Tensor):
        return part
    rows = stored_rows(part, 0, _num_rows(part))
    if part.decode is not None:
        return torch.from_numpy(np.ascontiguousarray(part.decode(rows.numpy()), np.float32))
    return rows.view(_FLOATS[part.kind])


def _num_rows(part: Tensor | StoredMatrix) -> int:
    return len(part) if isinstance(part, Tensor) else num_stored_rows(part)
