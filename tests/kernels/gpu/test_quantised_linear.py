"""Products with quantised weights against the dequantised ones, over odd shapes and in parts."""

import pytest
import torch
from torch import Tensor

from kernels import KernelConfig
from kernels.gpu import linear, quantised_linear, split_sum
from kernels.gpu.packed_weight import CodeFormat
from kernels.gpu.result_buffers import ResultBuffers
from kernels.gpu.stored_blocks import fp8_codes
from kernels.gpu.variant import ModelShapes
from kernels.stored_matrix import StoredKind
from tests.fakes.gpu_tensors import assert_launched_as_compiled, overhear
from tests.fakes.stored_weights import columns_for, random_stored

STORED = {
    CodeFormat.Q4: StoredKind.Q4_0,
    CodeFormat.Q4_MINIMUM: StoredKind.Q4_1,
    CodeFormat.Q4_WIDE: StoredKind.Q4_K,
    CodeFormat.INT8: StoredKind.Q8_0,
}
ROWS = [1, 3, 8, 9, 16, 17, 65]
# Relative to Σ |x| |w|. Sums are in float32, of numbers up to 17 times those of 4 bits; a device's
# large tile rounds weights to bfloat16, and a result in it is rounded, or, interpreted, cut off.
EXACT_WEIGHTS, ROUNDED = 2e-5, 2**-7


def packed_weight(
    code_format: CodeFormat, outputs: int, columns: int, device: torch.device, is_invariant=False
) -> tuple[linear.PackedLinear, Tensor]:
    """A layer of such weights, and these as floats."""
    if code_format is CodeFormat.FP8:
        config = KernelConfig(weights="fp8", batch_invariant=is_invariant)
        weight = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(0))
        packed = linear.pack_linear([weight], None, config, device)
        codes, scales = fp8_codes(weight).read(0, outputs, device)
        return packed, codes.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    kind = STORED[code_format]
    stored, floats = random_stored(kind, outputs, columns_for(kind, columns))
    config = KernelConfig(batch_invariant=is_invariant)
    return linear.pack_linear([stored], None, config, device), floats.to(device)


def product(packed: linear.PackedLinear, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full((len(x), packed.out_features), torch.nan, dtype=dtype or x.dtype)
    out = out.to(x.device)
    packed(x, out, ResultBuffers(x.device).scratch)
    return out


def assert_product(actual: Tensor, x: Tensor, weight: Tensor, reference, tolerance: float) -> None:
    expected = reference.linear(x.double(), (weight, None))
    magnitudes = x.double().abs() @ weight.double().abs().T
    assert torch.all((actual - expected).abs() <= tolerance * magnitudes)


@pytest.mark.parametrize("code_format", CodeFormat)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_product_is_that_of_the_dequantised_weights(
    device, randn, reference, code_format, num_rows
) -> None:
    packed, weight = packed_weight(code_format, 131, 352, device)
    x = randn(num_rows, weight.shape[1], dtype=torch.bfloat16)
    assert_product(product(packed, x), x, weight, reference, ROUNDED)


@pytest.mark.parametrize("code_format", CodeFormat)
@pytest.mark.parametrize(("num_rows", "outputs"), [(5, 1), (8, 64), (16, 65)])
def test_a_small_tile_rounds_nothing_of_the_weights(
    device, randn, reference, code_format, num_rows, outputs
) -> None:
    packed, weight = packed_weight(code_format, outputs, 288, device)
    # Activations whose mean is not near zero: the 4-bit codes' offset counts.
    x = (randn(num_rows, weight.shape[1]) + 1).bfloat16()
    assert_product(product(packed, x, torch.float32), x, weight, reference, EXACT_WEIGHTS)


@pytest.mark.parametrize("num_rows", [3, 17])
def test_parts_of_the_columns_are_summed(device, randn, reference, num_rows) -> None:
    packed, weight = packed_weight(CodeFormat.INT8, 40, 1056, device)
    x = randn(num_rows, 1056, dtype=torch.bfloat16)
    assert_product(product(packed, x), x, weight, reference, ROUNDED)


@pytest.mark.parametrize("code_format", CodeFormat)
@pytest.mark.parametrize("num_rows", [5, 12])
def test_a_row_with_nan_spoils_no_other(device, randn, code_format, num_rows) -> None:
    packed, weight = packed_weight(code_format, 33, 288, device)
    x = randn(num_rows, weight.shape[1], dtype=torch.bfloat16)
    expected = product(packed, x)
    x[3, 40] = torch.nan
    actual = product(packed, x)
    assert actual[3].isnan().all()
    others = torch.arange(num_rows, device=device) != 3
    assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("code_format", [CodeFormat.Q4_WIDE, CodeFormat.INT8])
def test_rows_of_a_tile_do_not_depend_on_each_other(device, randn, code_format) -> None:
    packed, weight = packed_weight(code_format, 33, 288, device)
    x = randn(8, weight.shape[1], dtype=torch.bfloat16)
    together = product(packed, x)
    for row in (0, 7):
        assert torch.equal(product(packed, x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(
    ("code_format", "columns"),
    [(CodeFormat.Q4_MINIMUM, 2112), (CodeFormat.INT8, 1056), (CodeFormat.FP8, 1024)],
)
def test_in_the_invariant_mode_a_row_has_the_same_bits_in_any_batch(
    device, randn, code_format, columns
) -> None:
    packed, _ = packed_weight(code_format, 20, columns, device, is_invariant=True)
    x = randn(67, columns, dtype=torch.bfloat16)
    # Of 67 rows one program sums the parts; of fewer each has its own.
    together = product(packed, x, torch.float32)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 20), slice(0, 64)):
        assert torch.equal(product(packed, x[rows], torch.float32), together[rows])


def test_rows_may_lie_apart_and_there_may_be_none(device, randn) -> None:
    packed, _ = packed_weight(CodeFormat.Q4, 33, 96, device)
    wide = randn(5, 160, dtype=torch.bfloat16)
    out = randn(5, 50, dtype=torch.bfloat16)
    before = out.clone()
    packed(wide[:, 32:128], out[:, 8:41], ResultBuffers(device).scratch)
    assert torch.equal(out[:, 8:41], product(packed, wide[:, 32:128].contiguous()))
    assert torch.equal(out[:, :8], before[:, :8]) and torch.equal(out[:, 41:], before[:, 41:])
    assert product(packed, wide[:0, :96]).shape == (0, 33)


@pytest.mark.parametrize("code_format", CodeFormat)
def test_what_is_compiled_ahead_is_what_is_launched(
    monkeypatch, device, randn, code_format
) -> None:
    packed, _ = packed_weight(code_format, 64, 2048, device)
    alone, _ = packed_weight(code_format, 64, 256, device)
    launches = overhear(monkeypatch, quantised_linear, "_linear_kernel")
    sums = overhear(monkeypatch, split_sum, "_sum_kernel")
    for rows in (8, 16, 64, 65):
        product(alone, randn(rows, 256, dtype=torch.bfloat16))
        product(packed, randn(rows, 2048, dtype=torch.bfloat16))
    *forms, plain, scaled, _, _ = quantised_linear.variants(ModelShapes(2048, 9, 3, 64, 1536, 100))
    own = [form for form in forms if form.constexprs["FORMAT"] == code_format]
    for launched, variant in zip(launches.seen, own, strict=True):
        assert_launched_as_compiled(launched, variant)
    for launched in sums.seen:
        is_scaled = code_format is CodeFormat.FP8
        assert_launched_as_compiled(launched, scaled if is_scaled else plain)
    assert len(sums.seen) == 4
