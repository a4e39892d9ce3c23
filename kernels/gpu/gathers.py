"""Rows by their index: of a table of embeddings, or of a batch's hidden states."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.variant import ModelShapes, Variant

# A program's part of a row: two readings of 16 bytes of 16-bit elements for each of its lanes.
_LARGEST_BLOCK = 2048
_SMALLEST_BLOCK = 128
_ELEMENTS_PER_LANE = 16


@triton.jit(do_not_specialize=["num_table_rows"])
def _gather_kernel(
    table,
    indices,
    out,
    table_stride,
    out_stride,
    num_table_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    index = tl.load(indices + row).to(tl.int64)
    width = tl.where((index >= 0) & (index < num_table_rows), WIDTH, 0)
    values = tl.load(table + index * table_stride + columns, mask=columns < width, other=0.0)
    tl.store(out + row * out_stride + columns, values, mask=mask)


def choose_block(width: int) -> tuple[int, int]:
    """The columns that one program copies, and its warps."""
    block = max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, triton.next_power_of_2(width)))
    return block, max(1, block // (32 * _ELEMENTS_PER_LANE))


def embedding(ids: Tensor, table: Tensor, out: Tensor) -> None:
    """Rows `ids` [T] of table [rows, width] into out [T, width].

    An id outside the table, as one of another rank's part of it is, gives a row of zeros. Rows are
    contiguous, but may lie apart.
    """
    num_rows, width = out.shape
    assert ids.shape == (num_rows,) and ids.is_contiguous() and table.shape[1] == width
    assert table.stride(1) == out.stride(1) == 1 and table.dtype == out.dtype
    if num_rows == 0:
        return
    block, num_warps = choose_block(width)
    _gather_kernel[(num_rows, triton.cdiv(width, block))](
        table,
        ids,
        out,
        table.stride(0),
        out.stride(0),
        len(table),
        WIDTH=width,
        BLOCK=block,
        num_warps=num_warps,
    )


def take_rows(x: Tensor, indices: Tensor, out: Tensor) -> None:
    """Rows `indices` [m] of x [T, width] into out [m, width], as `embedding` does."""
    embedding(indices, x, out)


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches."""
    for indices in (torch.int32, torch.int64):
        yield _variant(shapes.hidden_size, shapes.dtype, indices)


def _variant(width: int, dtype: torch.dtype, indices: torch.dtype) -> Variant:
    block, num_warps = choose_block(width)
    elements = pointer_type(dtype)
    strides = ("table_stride", "out_stride")
    return Variant(
        kernel=_gather_kernel,
        label=f"embedding, take_rows {elements} by {pointer_type(indices)} width {width}",
        signature={
            "table": elements,
            "indices": pointer_type(indices),
            "out": elements,
            **dict.fromkeys(strides, "i32"),
            "num_table_rows": "i32",
        },
        constexprs={"WIDTH": width, "BLOCK": block},
        num_warps=num_warps,
        divisible_by_16=strides if width % 16 == 0 else (),
    )
