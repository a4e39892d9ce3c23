"""RMS norm of rows, alone and together with the addition of a residual, in one reading of each.

rms_norm(x) = x / sqrt(mean(x²) + eps) · weight over a row (Zhang and Sennrich, 2019). A program
holds whole rows in its registers; which and how many depends on their width alone, so that a row's
result does not depend on how many there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.variant import ModelShapes, Variant

# A row must fit a program's registers: 64 elements a lane.
MAX_WIDTH = 32768
# A block of 16 warps is the largest that devices of 64 lanes have.
_MAX_WARPS = 16
# 16 bytes of 16-bit elements, as one instruction reads them.
_ELEMENTS_PER_LANE = 8
# Less work than this does not fill a program's four warps.
_SMALLEST_TILE = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    rows = rows.to(tl.int64)[:, None]
    columns = columns[None, :]
    values = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        places = residual + rows * residual_stride + columns
        values += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        # The norm is of the residual as the next layer will read it.
        rounded = values.to(residual.dtype.element_ty)
        tl.store(places, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scales = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)
    weights = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    normed = values * scales[:, None] * weights
    tl.store(out + rows * out_stride + columns, normed.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class RowTile:
    """What one program works on: `rows` whole rows, each padded to `block` elements."""

    rows: int
    block: int
    num_warps: int


def choose_tile(width: int) -> RowTile:
    """Raises ValueError for rows too wide."""
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} elements are too wide for a norm: {MAX_WIDTH} at most")
    block = triton.next_power_of_2(width)
    rows = max(1, _SMALLEST_TILE // block)
    num_warps = min(_MAX_WARPS, rows * block // (32 * _ELEMENTS_PER_LANE))
    return RowTile(rows, block, num_warps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """rms_norm of the rows of x [T, width] into out [T, width]; weight [width].

    Rows are contiguous, but may lie apart. `out` may be x.
    """
    _launch(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Adds x to `residual` [T, width] in place; rms_norm(residual) goes into out [T, width].

    The norm is of the sum as it is rounded in `residual`. `out` may be x.
    """
    _launch(x, residual, weight, eps, out)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    num_rows, width = x.shape
    if num_rows == 0:
        return
    assert x.stride(1) == out.stride(1) == weight.stride(0) == 1 and out.shape == x.shape
    assert residual is None or (residual.stride(1) == 1 and residual.shape == x.shape)
    tile = choose_tile(width)
    _rms_norm_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        num_rows,
        eps,
        WIDTH=width,
        BLOCK=tile.block,
        ROWS=tile.rows,
        HAS_RESIDUAL=residual is not None,
        num_warps=tile.num_warps,
    )


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches."""
    for has_residual in (False, True):
        yield _variant(shapes.hidden_size, shapes.dtype, has_residual)


def _variant(width: int, dtype: torch.dtype, has_residual: bool) -> Variant:
    tile = choose_tile(width)
    elements = pointer_type(dtype)
    tensors = ["x", "residual", "weight", "out"] if has_residual else ["x", "weight", "out"]
    strides = ("x_stride", "residual_stride", "out_stride")
    return Variant(
        kernel=_rms_norm_kernel,
        label=f"{'add_' * has_residual}rms_norm {elements} width {width}",
        signature={
            **dict.fromkeys(tensors, elements),
            **dict.fromkeys(strides, "i32"),
            "num_rows": "i32",
            "eps": "fp32",
        },
        constexprs={
            **({} if has_residual else {"residual": None}),
            "WIDTH": width,
            "BLOCK": tile.block,
            "ROWS": tile.rows,
            "HAS_RESIDUAL": has_residual,
        },
        num_warps=tile.num_warps,
        divisible_by_16=strides if width % 16 == 0 else (),
    )
