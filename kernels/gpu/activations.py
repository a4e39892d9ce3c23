"""Gated activations: act(gate) · up, where a row holds the gate and then up (Shazeer, 2020).

silu(x) = x sigmoid(x) (Elfwing et al., 2017). gelu in its tanh form is x (1 + tanh(u)) / 2 with
u = sqrt(2 / π) (x + 0.044715 x³) (Hendrycks and Gimpel, 2016), which is x sigmoid(2u): one kernel
computes both.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.variant import ModelShapes, Variant

# A program's part of a row: two readings of 16 bytes of each half for every lane of four warps.
_LARGEST_BLOCK = 2048
_SMALLEST_BLOCK = 128
_ELEMENTS_PER_LANE = 16


@triton.jit
def _gated_kernel(
    gate_up,
    out,
    gate_up_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    places = gate_up + row * gate_up_stride + columns
    gate = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(places + WIDTH, mask=mask, other=0.0).to(tl.float32)
    exponent = gate
    if IS_GELU:
        # 2 sqrt(2 / π)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # By a power that cannot overflow.
    power = tl.exp(-tl.abs(exponent))
    sigmoid = tl.where(exponent >= 0, 1.0, power) / (1.0 + power)
    result = (gate * sigmoid * up).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, result, mask=mask)


def choose_block(width: int) -> tuple[int, int]:
    """The columns that one program computes, and its warps."""
    block = max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, triton.next_power_of_2(width)))
    return block, max(1, block // (32 * _ELEMENTS_PER_LANE))


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """silu(gate) · up of gate_up [T, 2 · width], gate first, into out [T, width].

    Rows are contiguous, but may lie apart.
    """
    _launch(gate_up, out, is_gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """gelu_tanh(gate) · up of gate_up [T, 2 · width], gate first, into out [T, width].

    Rows are contiguous, but may lie apart.
    """
    _launch(gate_up, out, is_gelu=True)


def _launch(gate_up: Tensor, out: Tensor, is_gelu: bool) -> None:
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width)
    assert gate_up.stride(1) == out.stride(1) == 1
    if num_rows == 0:
        return
    block, num_warps = choose_block(width)
    _gated_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=block,
        IS_GELU=is_gelu,
        num_warps=num_warps,
    )


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches."""
    for is_gelu in (False, True):
        yield _variant(shapes.intermediate_size, shapes.dtype, is_gelu)


def _variant(width: int, dtype: torch.dtype, is_gelu: bool) -> Variant:
    block, num_warps = choose_block(width)
    elements = pointer_type(dtype)
    strides = ("gate_up_stride", "out_stride")
    return Variant(
        kernel=_gated_kernel,
        label=f"{'gelu_tanh' if is_gelu else 'silu'}_and_mul {elements} width {width}",
        signature={"gate_up": elements, "out": elements, **dict.fromkeys(strides, "i32")},
        constexprs={"WIDTH": width, "BLOCK": block, "IS_GELU": is_gelu},
        num_warps=num_warps,
        divisible_by_16=strides if width % 16 == 0 else (),
    )
