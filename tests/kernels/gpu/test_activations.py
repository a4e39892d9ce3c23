"""Gated activations against the reference: odd widths, extremes, strided rows, NaN."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.gpu import activations
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import assert_close, assert_launched_as_compiled, overhear

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    return (gelu * up).to(gate_up.dtype)


@pytest.fixture(params=["silu", "gelu_tanh"])
def ops(request, reference) -> tuple[Callable[[Tensor, Tensor], None], Callable[[Tensor], Tensor]]:
    if request.param == "silu":
        return activations.silu_and_mul, reference.silu_and_mul
    return activations.gelu_tanh_and_mul, gelu_tanh_and_mul


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 96, 1536, 4099])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_gated_activations(ops, randn, dtype, width, num_rows) -> None:
    activate, expected = ops
    gate_up = randn(num_rows, 2 * width, dtype=dtype) * 4
    out = randn(num_rows, width, dtype=dtype)
    activate(gate_up, out)
    if num_rows:
        assert_close(out, expected(gate_up))


def test_extremes_neither_overflow_nor_vanish(ops, randn) -> None:
    activate, expected = ops
    gates = [-1e12, -200.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 200.0, 1e5]
    gate_up = torch.tensor([gates + [1.0] * len(gates)]).to(randn(1))
    out = torch.empty_like(gate_up[:, : len(gates)])
    activate(gate_up, out)
    for value, wanted in zip(out[0], expected(gate_up)[0], strict=True):
        assert_close(value[None], wanted[None])


def test_a_row_is_bit_equal_alone_and_among_others_even_nan(ops, randn) -> None:
    activate, _ = ops
    # Rows of a wider tensor.
    gate_up = randn(9, 400, dtype=torch.bfloat16)[:, 8:208]
    gate_up[3, 5] = torch.nan
    out = torch.empty_like(gate_up[:, :100])
    activate(gate_up, out)
    assert out.isnan().nonzero().tolist() == [[3, 5]]
    for row in (0, 2, 4, 8):
        alone = torch.empty_like(out[:1])
        activate(gate_up[row : row + 1], alone)
        assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize(("width", "dtype"), [(1536, torch.bfloat16), (72, torch.float32)])
def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch, randn, width, dtype) -> None:
    launches = overhear(monkeypatch, activations, "_gated_kernel")
    gate_up, out = randn(3, 2 * width, dtype=dtype), randn(3, width, dtype=dtype)
    activations.silu_and_mul(gate_up, out)
    activations.gelu_tanh_and_mul(gate_up, out)
    shapes = ModelShapes(576, 9, 3, 64, width, 100, dtype=dtype)
    for launched, variant in zip(launches.seen, activations.variants(shapes), strict=True):
        assert_launched_as_compiled(launched, variant)
