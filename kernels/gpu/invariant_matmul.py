"""A dense linear layer whose rows do not depend on each other: out = x weightᵀ + bias.

One tile and one order of the columns for any number of rows, sums in float32. So a row has the same
bits alone, in any batch, and in any chunk of a prompt, which cuBLAS does not promise: it chooses by
the shape. The columns lie in parts that are cut by the weight's shape alone. Each part's sum starts
from zero, and parts are added in order: one program adds its parts itself, or, where there are few
rows, parts have programs of their own and split_sum.py adds them in the same order.

A program takes one tile after the other (persistent), in the order of tile_order.py.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kernels.gpu.linear_tiles import INVARIANT_DENSE_TILE as TILE
from kernels.gpu.linear_tiles import LinearDevice, choose_parts
from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.split_sum import Scratch, sum_parts, sum_variant
from kernels.gpu.tile_order import tile_place
from kernels.gpu.variant import ModelShapes, Variant

# Of a step, whatever the type: 64 columns of 16 bits.
_STEP_BYTES = 128
# As many programs fit a processor's shared memory and registers.
_PROGRAMS_PER_PROCESSOR = 2
# Arguments that a compiled kernel takes any value of.
_COUNTS = ["num_rows", "num_parts", "steps_per_part", "parts_per_program", "is_spread"]
# Triton's interpreter multiplies matrices of bfloat16 as if they were integers; converted to
# float32 they are what they were.
_INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)


@triton.jit(do_not_specialize=_COUNTS)
def _matmul_kernel(
    x, weight, bias, out, num_rows, num_outputs, num_columns, num_parts, steps_per_part,
    parts_per_program, is_spread, x_stride, weight_stride, out_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    OPERAND: tl.constexpr = tl.float32 if _INTERPRETED else x.dtype.element_ty
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    num_output_tiles = tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    num_tiles = num_row_tiles * num_output_tiles
    num_steps = tl.cdiv(num_columns, BLOCK_COLUMNS)
    part_size = num_rows.to(tl.int64) * out_stride
    lanes = tl.arange(0, BLOCK_COLUMNS)
    for item in range(
        tl.program_id(0), num_tiles * (num_parts // parts_per_program), tl.num_programs(0)
    ):
        row_tile, output_tile = tile_place(item % num_tiles, num_row_tiles, num_output_tiles)
        first_part = item // num_tiles * parts_per_program
        rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        outputs = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        # Beyond the last, rows and outputs are computed as the last, and not stored.
        x_rows = x + (tl.minimum(rows, num_rows - 1).to(tl.int64) * x_stride)[:, None]
        last_output = tl.minimum(outputs, num_outputs - 1)
        weight_rows = weight + (last_output.to(tl.int64) * weight_stride)[None, :]
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
        for part in range(first_part, first_part + parts_per_program):
            part_total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
            first_step = part * steps_per_part
            last_step = tl.minimum(first_step + steps_per_part, num_steps)
            for step in tl.range(first_step, last_step, num_stages=STAGES):
                columns = step * BLOCK_COLUMNS + lanes
                mask = columns < num_columns
                left = tl.load(x_rows + columns[None, :], mask=mask[None, :], other=0.0)
                right = tl.load(weight_rows + columns[:, None], mask=mask[:, None], other=0.0)
                part_total = tl.dot(
                    left.to(OPERAND), right.to(OPERAND), part_total, input_precision="ieee"
                )
            total += part_total
        if is_spread == 0:
            total += tl.load(bias + last_output)[None, :]
        places = out + first_part * part_size
        places += rows[:, None].to(tl.int64) * out_stride + outputs[None, :]
        mask = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=mask)


def invariant_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    scratch: Scratch,
    device: LinearDevice,
) -> None:
    """x [T, columns] weightᵀ + bias into out [T, outputs], of x's type or float32.

    weight [outputs, columns] of x's type; bias float32 [outputs]. Rows are contiguous, but may lie
    apart.
    """
    num_rows, num_columns = x.shape
    num_outputs = len(weight)
    assert weight.shape[1] == num_columns and out.shape == (num_rows, num_outputs)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1 and x.dtype == weight.dtype
    if num_rows == 0:
        return
    block_columns = _STEP_BYTES // x.dtype.itemsize
    num_steps = triton.cdiv(num_columns, block_columns)
    parts = choose_parts(TILE, num_rows, num_outputs, num_steps, device, True)
    result = out
    if parts.is_spread:
        result = scratch("linear parts", (parts.number, *out.shape), torch.float32)
    num_tiles = triton.cdiv(num_rows, TILE.rows) * triton.cdiv(num_outputs, TILE.outputs)
    num_items = num_tiles * (parts.number if parts.is_spread else 1)
    _matmul_kernel[(min(num_items, device.num_processors * _PROGRAMS_PER_PROCESSOR),)](
        x,
        weight,
        bias,
        result,
        num_rows,
        num_outputs,
        num_columns,
        parts.number,
        parts.steps,
        1 if parts.is_spread else parts.number,
        int(parts.is_spread),
        x.stride(0),
        weight.stride(0),
        result.stride(-2),
        **_constexprs(x.dtype),
        num_warps=TILE.num_warps,
    )
    if parts.is_spread:
        sum_parts(result, None, bias, out)


def _constexprs(dtype: torch.dtype) -> dict[str, int]:
    return {
        "BLOCK_ROWS": TILE.rows,
        "BLOCK_OUTPUTS": TILE.outputs,
        "BLOCK_COLUMNS": _STEP_BYTES // dtype.itemsize,
        "STAGES": TILE.num_stages,
    }


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches in the batch-invariant mode."""
    # Logits are float32, and what is left of parts.
    for out_dtype in dict.fromkeys((shapes.dtype, torch.float32)):
        yield _variant(shapes.dtype, out_dtype)
    for dtype in dict.fromkeys((shapes.dtype, torch.float32)):
        yield sum_variant(dtype)


def _variant(dtype: torch.dtype, out_dtype: torch.dtype) -> Variant:
    elements, results = pointer_type(dtype), pointer_type(out_dtype)
    sizes = ("num_outputs", "num_columns", "x_stride", "weight_stride", "out_stride")
    return Variant(
        kernel=_matmul_kernel,
        label=f"batch-invariant linear, {elements} to {results}",
        signature={
            **dict.fromkeys(("x", "weight"), elements),
            "bias": "*fp32",
            "out": results,
            **dict.fromkeys((*_COUNTS, *sizes), "i32"),
        },
        constexprs=_constexprs(dtype),
        num_warps=TILE.num_warps,
        may_spill=True,
        divisible_by_16=sizes,
    )
