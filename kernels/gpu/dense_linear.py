"""A dense linear layer: by cuBLAS, which torch calls, or the batch-invariant product."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.invariant_matmul import invariant_matmul
from kernels.gpu.linear_tiles import LinearDevice
from kernels.gpu.split_sum import Scratch


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix:
    """A weight [outputs, columns] and a bias [outputs] of one type, on one device."""

    weight: Tensor
    bias: Tensor | None
    # The bias or zeros, float32, as the batch-invariant product reads it.
    wide_bias: Tensor

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def num_columns(self) -> int:
        return self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


def dense_matrix(weight: Tensor, bias: Tensor | None) -> DenseMatrix:
    """weight [outputs, columns] is kept as it is; bias [outputs] is converted to its type."""
    if bias is None:
        return DenseMatrix(weight, None, torch.zeros(len(weight), device=weight.device))
    bias = bias.to(weight.device, weight.dtype)
    return DenseMatrix(weight, bias, bias.float())


def dense_linear(
    x: Tensor,
    matrix: DenseMatrix,
    out: Tensor,
    scratch: Scratch,
    device: LinearDevice,
    batch_invariant: bool,
) -> None:
    """x [T, columns] weightᵀ + bias into out [T, outputs], all of one type."""
    if batch_invariant:
        invariant_matmul(x, matrix.weight, matrix.wide_bias, out, scratch, device)
    elif matrix.bias is None:
        torch.mm(x, matrix.weight.t(), out=out)
    else:
        torch.addmm(matrix.bias, x, matrix.weight.t(), out=out)
