"""Adds up what several programs left of one product, in order, and the bias to it."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.variant import Variant

# (purpose, shape, dtype) -> a tensor of arbitrary contents, which live until it is asked again.
Scratch = Callable[[str, tuple[int, ...], torch.dtype], Tensor]

_BLOCK = 256


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _sum_kernel(
    parts, scales, bias, out, num_parts, num_rows, num_outputs, out_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < num_outputs
    places = parts + row * num_outputs + outputs
    part_size = num_rows.to(tl.int64) * num_outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, num_parts):
        total += tl.load(places + part * part_size, mask=mask, other=0.0)
    biases = tl.load(bias + outputs, mask=mask, other=0.0)
    if scales is None:
        total += biases
    else:
        total = tl.fma(total, tl.load(scales + outputs, mask=mask, other=0.0), biases)
    tl.store(out + row * out_stride + outputs, total.to(out.dtype.element_ty), mask=mask)


def sum_parts(parts: Tensor, scales: Tensor | None, bias: Tensor, out: Tensor) -> None:
    """Σ parts · scales + bias into out [rows, outputs].

    parts float32 [parts, rows, outputs]; scales, or None for 1, and bias float32 [outputs].
    """
    num_parts, num_rows, num_outputs = parts.shape
    assert parts.is_contiguous() and out.stride(1) == 1
    _sum_kernel[(num_rows, triton.cdiv(num_outputs, _BLOCK))](
        parts,
        scales,
        bias,
        out,
        num_parts,
        num_rows,
        num_outputs,
        out.stride(0),
        BLOCK=_BLOCK,
        num_warps=2,
    )


def sum_variant(dtype: torch.dtype, has_scales: bool = False) -> Variant:
    """What `sum_parts` launches for results of a type."""
    integers = ("num_parts", "num_rows", "num_outputs", "out_stride")
    return Variant(
        kernel=_sum_kernel,
        label=f"linear, sum of {'scaled ' * has_scales}parts {pointer_type(dtype)}",
        signature={
            **dict.fromkeys(["parts", "bias", *["scales"] * has_scales], "*fp32"),
            "out": pointer_type(dtype),
            **dict.fromkeys(integers, "i32"),
        },
        constexprs={**({} if has_scales else {"scales": None}), "BLOCK": _BLOCK},
        num_warps=2,
        divisible_by_16=("num_outputs", "out_stride"),
    )
