"""The norms against the reference: odd widths and counts, strided rows, NaN, what is compiled."""

import pytest
import torch

from kernels.gpu import norms
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import assert_close, assert_launched_as_compiled, overhear

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 64, 576, 1000, 4096])
@pytest.mark.parametrize("num_rows", [1, 2, 17])
def test_rms_norm_and_add_rms_norm(reference, randn, dtype, width, num_rows) -> None:
    x, residual = randn(num_rows, width, dtype=dtype), randn(num_rows, width, dtype=dtype)
    weight, out = randn(width, dtype=dtype), torch.empty_like(x)
    norms.rms_norm(x, weight, EPS, out)
    assert_close(out, reference.rms_norm(x, weight, EPS))
    added = x + residual
    norms.add_rms_norm(x, residual, weight, EPS, out)
    assert_close(residual, added)
    # The norm is of the residual as it was rounded.
    norms.rms_norm(residual, weight, EPS, x)
    assert torch.equal(out, x)


def test_no_rows(randn) -> None:
    x = randn(0, 64)
    norms.rms_norm(x, randn(64), EPS, x)
    norms.add_rms_norm(x, x, randn(64), EPS, x)


def test_rows_of_a_wider_tensor_and_a_result_in_place(reference, randn) -> None:
    wide, weight = randn(5, 200), randn(96)
    x, before = wide[:, 8:104], wide.clone()
    norms.rms_norm(x, weight, EPS, x)
    assert_close(x, reference.rms_norm(before[:, 8:104], weight, EPS))
    assert torch.equal(wide[:, :8], before[:, :8])
    assert torch.equal(wide[:, 104:], before[:, 104:])


def test_large_and_tiny_values_keep_their_scale(reference, randn) -> None:
    x, weight = randn(4, 64) * torch.tensor([1e15, 1e-15, 0.0, 1.0])[:, None], randn(64)
    out = torch.empty_like(x)
    norms.rms_norm(x, weight, EPS, out)
    for row, expected in zip(out, reference.rms_norm(x, weight, EPS), strict=True):
        assert_close(row, expected)


@pytest.mark.parametrize("width", [33, 64, 1000])
def test_a_row_is_bit_equal_alone_and_among_others_even_nan(randn, width) -> None:
    x, weight = randn(35, width, dtype=torch.bfloat16), randn(width, dtype=torch.bfloat16)
    x[3, 5] = torch.nan
    out, residual = torch.empty_like(x), torch.ones_like(x)
    norms.add_rms_norm(x, residual, weight, EPS, out)
    assert out[3].isnan().all() and not out[[*range(3), *range(4, 35)]].isnan().any()
    for first, size in [(0, 1), (2, 1), (4, 3), (17, 18)]:
        part = x[first : first + size]
        alone, alone_residual = torch.empty_like(part), torch.ones_like(part)
        norms.add_rms_norm(part, alone_residual, weight, EPS, alone)
        assert torch.equal(alone, out[first : first + size])
        assert torch.equal(alone_residual, residual[first : first + size])


def test_rows_too_wide_for_registers_are_refused(randn) -> None:
    norms.choose_tile(norms.MAX_WIDTH)
    with pytest.raises(ValueError, match="too wide"):
        norms.choose_tile(norms.MAX_WIDTH + 1)


@pytest.mark.parametrize(("width", "dtype"), [(576, torch.bfloat16), (40, torch.float32)])
def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch, randn, width, dtype) -> None:
    launches = overhear(monkeypatch, norms, "_rms_norm_kernel")
    x, weight = randn(3, width, dtype=dtype), randn(width, dtype=dtype)
    norms.rms_norm(x, weight, EPS, torch.empty_like(x))
    norms.add_rms_norm(x, torch.empty_like(x), weight, EPS, torch.empty_like(x))
    shapes = ModelShapes(width, 9, 3, 64, 1536, 100, dtype=dtype)
    for launched, variant in zip(launches.seen, norms.variants(shapes), strict=True):
        assert_launched_as_compiled(launched, variant)
        assert not variant.may_spill
