"""Linear layers of quantised weights, which are dequantised in registers: out = x weightᵀ + bias.

The product is taken transposed, weight · xᵀ: the weights are then the matrix unit's first operand,
which it reads from registers, and few rows of x fill its other side. A step of the loop takes the
codes of BLOCK_OUTPUTS outputs and 4 or 8 groups of 32 columns, which lie side by side in memory
(packed_weight.py).

In a small tile the codes themselves, integers that bfloat16 holds exactly, are multiplied, and a
group's product is scaled afterwards, in float32: Σ (scale · q + minimum) x over a group is
scale · Σ q x + minimum · Σ x, so nothing of the weights is rounded. A 4-bit code comes as the
bfloat16 number 128 + q, which takes one operation for two codes (after Kim et al., "Who Says
Elephants Can't Run", 2022); the 128 is taken back with the minimum. In a large tile scaling would
cost more than the product: there weights are dequantised first, and rounded to the type of x.

The columns lie in parts, each so many steps. A part's sum starts from zero, and parts are added in
order: by one program, or by split_sum.py, where few programs would leave the device idle and each
takes one part. Both give the same bits. So a row's result depends on the tile and the parts alone,
which the batch-invariant mode fixes (linear_tiles.py).
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kernels.gpu.linear_tiles import (
    EIGHT_ROWS,
    MANY_ROWS,
    QUANTISED_TILES,
    LinearDevice,
    LinearTile,
    choose_parts,
    choose_tile,
)
from kernels.gpu.packed_weight import CodeFormat, PackedMatrix
from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.quantised_groups import eight_bit_numbers, four_bit_numbers, group_scale
from kernels.gpu.split_sum import Scratch, sum_parts, sum_variant
from kernels.gpu.tile_order import tile_place
from kernels.gpu.variant import ModelShapes, Variant

_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
# Arguments that a compiled kernel takes any value of.
_COUNTS = ["num_rows", "num_steps", "steps_per_part", "parts_per_program", "is_spread"]
# Triton's interpreter multiplies matrices of bfloat16 as if they were integers; converted to
# float32 they are what they were.
_INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)
# Columns that a product in float32 has at least, by the compiler's version.
_SUMMED: tl.constexpr = tl.constexpr(8 if _TRITON >= (3, 8) else 16)
# Devices, by their names in compilation.py, that the smallest and the largest tile are for.
_NVIDIA = ("sm_80", "sm_90")


@triton.jit
def _columns_of(groups, num_columns):
    """The first column of groups; those beyond the last, whose weights are zeros, read the last."""
    return tl.minimum(groups * 32, num_columns - 32)


@triton.jit
def _four_bit_step(
    total, x, words, scales, step, num_columns, padded_outputs,
    FORMAT: tl.constexpr, OPERAND: tl.constexpr, SCALES_FIRST: tl.constexpr,
):  # fmt: skip
    """Adds the products of 8 groups to total [outputs, rows].

    x [rows], words [outputs, 1], scales [outputs]: where rows, codes and scales begin.
    """
    lanes = tl.arange(0, 32)
    half_lanes = tl.arange(0, 16)[None, :]
    first_words = tl.load(words + half_lanes)
    last_words = tl.load(words + 16 + half_lanes)
    for group in tl.static_range(8):
        columns = _columns_of(step * 8 + group, num_columns) + lanes
        values = tl.load(x[None, :] + columns[:, None]).to(OPERAND)
        numbers = four_bit_numbers(first_words if group < 4 else last_words, group)
        scale, minimum = group_scale(scales, padded_outputs, group, FORMAT)
        if SCALES_FIRST:
            shift = minimum - 128.0 * scale
            weights = tl.fma(numbers.to(tl.float32), scale[:, None], shift[:, None])
            total = tl.dot(weights.to(OPERAND), values, total, input_precision="ieee")
        else:
            product = tl.dot(numbers.to(OPERAND), values, input_precision="ieee")
            total = tl.fma(product, scale[:, None], total)
    if not SCALES_FIRST:
        # Each group, or each twice and by halves.
        groups = tl.arange(0, _SUMMED) % 8
        columns = _columns_of(step * 8 + groups, num_columns)
        places = x[:, None, None] + columns[None, :, None] + lanes[None, None, :]
        sums = tl.sum(tl.load(places).to(tl.float32), 2)
        scale, minimum = group_scale(scales[:, None], padded_outputs, groups[None, :], FORMAT)
        shifts = (minimum - 128.0 * scale) * (8 / _SUMMED)
        total = tl.dot(shifts, tl.trans(sums), total, input_precision="ieee")
    return total


@triton.jit
def _eight_bit_step(
    total, x, words, scales, step, num_columns, padded_outputs,
    FORMAT: tl.constexpr, OPERAND: tl.constexpr, SCALES_FIRST: tl.constexpr,
):  # fmt: skip
    """As `_four_bit_step`, of 4 groups; fp8's one scale of a row is left to the end."""
    lanes = tl.arange(0, 32)
    codes = tl.load(words + lanes[None, :])
    for group in tl.static_range(4):
        columns = _columns_of(step * 4 + group, num_columns) + lanes
        values = tl.load(x[None, :] + columns[:, None]).to(OPERAND)
        numbers = eight_bit_numbers(codes, group, FORMAT)
        if FORMAT == "fp8":
            total = tl.dot(numbers.to(OPERAND), values, total, input_precision="ieee")
        else:
            scale, _ = group_scale(scales, padded_outputs, group, FORMAT)
            if SCALES_FIRST:
                weights = (numbers * scale[:, None]).to(OPERAND)
                total = tl.dot(weights, values, total, input_precision="ieee")
            else:
                product = tl.dot(numbers.to(OPERAND), values, input_precision="ieee")
                total = tl.fma(product, scale[:, None], total)
    return total


@triton.jit(do_not_specialize=_COUNTS)
def _linear_kernel(
    x, codes, scales, bias, out, num_rows, num_outputs, num_columns, padded_outputs, num_steps,
    steps_per_part, parts_per_program, is_spread, x_stride, out_stride,
    FORMAT: tl.constexpr, NUM_GROUPS: tl.constexpr, SCALE_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, SCALES_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    OPERAND: tl.constexpr = tl.float32 if _INTERPRETED else x.dtype.element_ty
    row_tile, output_tile = tile_place(
        tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    )
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Rows of a tile beyond the last compute what the last does, and are not stored.
    x += tl.minimum(rows, num_rows - 1).to(tl.int64) * x_stride
    out += tl.program_id(1).to(tl.int64) * num_rows * out_stride
    first_part = tl.program_id(1) * parts_per_program
    step_size = padded_outputs.to(tl.int64)
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    for part in range(first_part, first_part + parts_per_program):
        part_total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
        first_step = part * steps_per_part
        last_step = tl.minimum(first_step + steps_per_part, num_steps)
        # Asked for here, since otherwise only what a product reads is fetched steps ahead.
        for step in tl.range(first_step, last_step, num_stages=STAGES):
            start = step * step_size
            words = codes + (start + outputs)[:, None] * 32
            of_step = scales + (start * SCALE_WORDS + outputs)
            if NUM_GROUPS == 8:
                part_total = _four_bit_step(
                    part_total, x, words, of_step, step, num_columns, padded_outputs,
                    FORMAT, OPERAND, SCALES_FIRST,
                )  # fmt: skip
            else:
                part_total = _eight_bit_step(
                    part_total, x, words, of_step, step, num_columns, padded_outputs,
                    FORMAT, OPERAND, SCALES_FIRST,
                )  # fmt: skip
        total += part_total
    if is_spread == 0:
        biases = tl.load(bias + outputs)[:, None]
        if FORMAT == "fp8":
            total = tl.fma(total, tl.load(scales + outputs)[:, None], biases)
        else:
            total += biases
    places = out + rows[None, :].to(tl.int64) * out_stride + outputs[:, None]
    mask = (rows < num_rows)[None, :] & (outputs < num_outputs)[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=mask)


def quantised_linear(
    x: Tensor,
    matrix: PackedMatrix,
    out: Tensor,
    scratch: Scratch,
    device: LinearDevice,
    batch_invariant: bool,
) -> None:
    """x [T, columns] weightᵀ + bias into out [T, outputs], of x's type or float32.

    Rows are contiguous, but may lie apart.
    """
    num_rows, num_columns = x.shape
    assert num_columns == matrix.num_columns and out.shape == (num_rows, matrix.num_outputs)
    assert x.stride(1) == out.stride(1) == 1
    if num_rows == 0:
        return
    tile = choose_tile(num_rows, device, batch_invariant)
    parts = choose_parts(
        tile, num_rows, matrix.num_outputs, matrix.num_steps, device, batch_invariant
    )
    result = out
    if parts.is_spread:
        result = scratch("linear parts", (parts.number, *out.shape), torch.float32)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(out.shape[1], tile.outputs)
    _linear_kernel[(num_tiles, parts.number if parts.is_spread else 1)](
        x,
        matrix.codes,
        matrix.scales,
        matrix.bias,
        result,
        num_rows,
        matrix.num_outputs,
        num_columns,
        matrix.codes.shape[1],
        matrix.num_steps,
        parts.steps,
        1 if parts.is_spread else parts.number,
        int(parts.is_spread),
        x.stride(0),
        result.stride(-2),
        **_constexprs(matrix.format, tile),
        num_warps=tile.num_warps,
    )
    if parts.is_spread:
        row_scales = matrix.scales if matrix.format is CodeFormat.FP8 else None
        sum_parts(result, row_scales, matrix.bias, out)


def _constexprs(code_format: CodeFormat, tile: LinearTile) -> dict[str, Any]:
    return {
        "FORMAT": str(code_format),
        "NUM_GROUPS": code_format.groups_per_step,
        "SCALE_WORDS": code_format.scale_words,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_OUTPUTS": tile.outputs,
        "SCALES_FIRST": tile.scales_first,
        "STAGES": tile.num_stages,
    }


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches, whatever its weights are; in float32 none are such."""
    if shapes.dtype == torch.float32:
        return
    for code_format in CodeFormat:
        for tile in QUANTISED_TILES:
            # Logits are float32, and what is left of parts.
            for out_dtype in (shapes.dtype, torch.float32):
                yield _variant(code_format, tile, shapes.dtype, out_dtype)
    for dtype in dict.fromkeys((shapes.dtype, torch.float32)):
        yield sum_variant(dtype)
        yield sum_variant(dtype, has_scales=True)


def _variant(
    code_format: CodeFormat, tile: LinearTile, dtype: torch.dtype, out_dtype: torch.dtype
) -> Variant:
    sizes = ("num_outputs", "num_columns", "padded_outputs", "x_stride", "out_stride")
    is_fp8 = code_format is CodeFormat.FP8
    elements, results = pointer_type(dtype), pointer_type(out_dtype)
    return Variant(
        kernel=_linear_kernel,
        label=f"linear {code_format}, {tile.rows} rows, {elements} to {results}",
        signature={
            "x": elements,
            "codes": "*i32",
            "scales": "*fp32" if is_fp8 else "*i32",
            "bias": "*fp32",
            "out": results,
            **dict.fromkeys((*_COUNTS, *sizes), "i32"),
        },
        constexprs=_constexprs(code_format, tile),
        num_warps=tile.num_warps,
        may_spill=True,
        divisible_by_16=sizes,
        needs=frozenset({"fp8"} if is_fp8 else ()),
        devices=frozenset(_NVIDIA if tile in (EIGHT_ROWS, MANY_ROWS) else ()),
    )
