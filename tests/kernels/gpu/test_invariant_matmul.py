"""The dense product whose rows have the same bits in any batch."""

import pytest
import torch
from torch import Tensor

from kernels.gpu import invariant_matmul as module
from kernels.gpu import split_sum
from kernels.gpu.linear_tiles import REHEARSED_DEVICE
from kernels.gpu.result_buffers import ResultBuffers
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import assert_close, assert_launched_as_compiled, overhear


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=dtype or x.dtype, device=x.device)
    if bias is None:
        bias = torch.zeros(len(weight), device=x.device)
    module.invariant_matmul(x, weight, bias, out, ResultBuffers(x.device).scratch, REHEARSED_DEVICE)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 65])
@pytest.mark.parametrize(("outputs", "columns"), [(1, 1), (33, 100), (257, 577)])
def test_a_product_of_any_shape(
    device, randn, reference, dtype, num_rows, outputs, columns
) -> None:
    x, weight = randn(num_rows, columns, dtype=dtype), randn(outputs, columns, dtype=dtype)
    bias = randn(outputs)
    assert_close(product(x, weight, bias), reference.linear(x, (weight, bias)))


def test_many_row_tiles_are_all_computed(device, randn, reference) -> None:
    x, weight = randn(1100, 8), randn(300, 8)
    assert_close(product(x, weight), reference.linear(x, (weight, None)))


@pytest.mark.parametrize("columns", [100, 1056])
def test_a_row_has_the_same_bits_in_any_batch(device, randn, columns) -> None:
    x, weight = randn(131, columns, dtype=torch.bfloat16), randn(45, columns, dtype=torch.bfloat16)
    # Of 131 rows one program sums the parts; of up to 64 each part has its own.
    together = product(x, weight, dtype=torch.float32)
    for rows in (slice(0, 1), slice(130, 131), slice(60, 77), slice(5, 69)):
        assert torch.equal(product(x[rows], weight, dtype=torch.float32), together[rows])


@pytest.mark.parametrize("num_rows", [5, 70])
def test_a_row_with_nan_spoils_no_other(device, randn, num_rows) -> None:
    x, weight = randn(num_rows, 577, dtype=torch.bfloat16), randn(33, 577, dtype=torch.bfloat16)
    expected = product(x, weight)
    x[4, 576] = torch.nan
    actual = product(x, weight)
    assert actual[4].isnan().all()
    others = torch.arange(num_rows, device=device) != 4
    assert torch.equal(actual[others], expected[others])


def test_rows_may_lie_apart_and_there_may_be_none(device, randn) -> None:
    wide, weight = randn(5, 160, dtype=torch.bfloat16), randn(33, 192, dtype=torch.bfloat16)
    out = randn(5, 50, dtype=torch.bfloat16)
    before, zeros = out.clone(), torch.zeros(33, device=device)
    x, part = wide[:, 32:128], weight[:, 64:160]
    scratch = ResultBuffers(device).scratch
    module.invariant_matmul(x, part, zeros, out[:, 8:41], scratch, REHEARSED_DEVICE)
    assert torch.equal(out[:, 8:41], product(x.contiguous(), part.contiguous()))
    assert torch.equal(out[:, :8], before[:, :8]) and torch.equal(out[:, 41:], before[:, 41:])
    assert product(x[:0], part).shape == (0, 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch, device, randn, dtype) -> None:
    launches = overhear(monkeypatch, module, "_matmul_kernel")
    sums = overhear(monkeypatch, split_sum, "_sum_kernel")
    for columns in (64, 1024):
        product(randn(3, columns, dtype=dtype), randn(16, columns, dtype=dtype))
    shapes = ModelShapes(64, 9, 3, 64, 1536, 100, dtype=dtype)
    forms = [form for form in module.variants(shapes) if "weight" in form.signature]
    total = next(form for form in module.variants(shapes) if "parts" in form.signature)
    # In float32 one form serves both.
    for launched, variant in zip(launches.seen, [forms[0], forms[-1]], strict=True):
        assert_launched_as_compiled(launched, variant)
    (launched,) = sums.seen
    assert_launched_as_compiled(launched, total)
