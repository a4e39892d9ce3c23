"""Rows of a quantised table, dequantised: the weight of a tied head, in the same memory."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.packed_weight import CodeFormat, PackedMatrix
from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.quantised_groups import eight_bit_numbers, four_bit_numbers, group_scale
from kernels.gpu.variant import ModelShapes, Variant


@triton.jit
def _look_up_kernel(
    ids, codes, scales, out, num_outputs, num_columns, padded_outputs, out_stride,
    FORMAT: tl.constexpr, NUM_GROUPS: tl.constexpr, SCALE_WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    index = tl.load(ids + row).to(tl.int64)
    is_inside = (index >= 0) & (index < num_outputs)
    # An output [1], as the linear layer's helpers take them.
    output = tl.where(is_inside, index, 0) + tl.arange(0, 1)
    start = step * padded_outputs.to(tl.int64)
    words = codes + (start + output)[:, None] * 32
    of_step = scales + start * SCALE_WORDS + output
    lanes = tl.arange(0, 32)
    half_lanes = tl.arange(0, 16)[None, :]
    if NUM_GROUPS == 8:
        first_words = tl.load(words + half_lanes)
        last_words = tl.load(words + 16 + half_lanes)
    else:
        all_words = tl.load(words + lanes[None, :])
    for group in tl.static_range(NUM_GROUPS):
        if NUM_GROUPS == 8:
            chosen = first_words if group < 4 else last_words
            numbers = four_bit_numbers(chosen, group).to(tl.float32) - 128.0
        else:
            numbers = eight_bit_numbers(all_words, group, FORMAT)
        if FORMAT == "fp8":
            values = numbers * tl.load(scales + output)[:, None]
        elif FORMAT == "int8":
            scale, _ = group_scale(of_step, padded_outputs, group, FORMAT)
            values = numbers * scale[:, None]
        else:
            scale, minimum = group_scale(of_step, padded_outputs, group, FORMAT)
            values = numbers * scale[:, None] + minimum[:, None]
        columns = ((step * NUM_GROUPS + group) * 32 + lanes)[None, :]
        values = tl.where(is_inside, values, 0.0).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + columns, values, mask=columns < num_columns)


def look_up(ids: Tensor, table: PackedMatrix, out: Tensor) -> None:
    """Rows `ids` [T] of a table into out [T, columns].

    An id outside the table, as one of another rank's part of it is, gives a row of zeros.
    """
    num_rows = len(ids)
    assert out.shape == (num_rows, table.num_columns) and out.stride(1) == 1
    assert ids.is_contiguous()
    if num_rows == 0:
        return
    _look_up_kernel[(num_rows, table.num_steps)](
        ids,
        table.codes,
        table.scales,
        out,
        table.num_outputs,
        table.num_columns,
        table.codes.shape[1],
        out.stride(0),
        FORMAT=str(table.format),
        NUM_GROUPS=table.format.groups_per_step,
        SCALE_WORDS=table.format.scale_words,
        num_warps=1,
    )


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches, whatever its weights are; in float32 none are such."""
    if shapes.dtype == torch.float32:
        return
    for code_format in CodeFormat:
        for ids in (torch.int32, torch.int64):
            yield _variant(code_format, ids, shapes.dtype)


def _variant(code_format: CodeFormat, ids: torch.dtype, dtype: torch.dtype) -> Variant:
    sizes = ("num_outputs", "num_columns", "padded_outputs", "out_stride")
    is_fp8 = code_format is CodeFormat.FP8
    return Variant(
        kernel=_look_up_kernel,
        label=f"embedding {code_format} {pointer_type(dtype)} by {pointer_type(ids)}",
        signature={
            "ids": pointer_type(ids),
            "codes": "*i32",
            "scales": "*fp32" if is_fp8 else "*i32",
            "out": pointer_type(dtype),
            **dict.fromkeys(sizes, "i32"),
        },
        constexprs={
            "FORMAT": str(code_format),
            "NUM_GROUPS": code_format.groups_per_step,
            "SCALE_WORDS": code_format.scale_words,
        },
        num_warps=1,
        divisible_by_16=sizes,
        needs=frozenset({"fp8"} if is_fp8 else ()),
    )
