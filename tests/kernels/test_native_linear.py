"""Linear layers of the native CPU library, every build against plain arithmetic.

Builds give the same bits, and so do a row alone, in any batch, and any number of threads.
"""

import numpy as np
import pytest

from kernels.cpu import library
from tests.fakes.native_linear import (
    BF16,
    F32,
    FORMATS,
    Q4,
    Q8,
    QUANTISED,
    SOURCE_Q4_1,
    SOURCE_Q8_0,
    Native,
    address,
    assert_close,
    columns_for,
    empty_activations,
    gated_linear,
    linear,
    most_quantised,
    open_native,
    pack,
    quantised,
    random_activations,
    random_weight,
    same_bits,
)

# Rows, and columns for formats whose blocks have 32 columns; others take any number.
SHAPES = ((1, 32), (16, 64), (33, 96), (100, 320), (64, 1536))


@pytest.mark.parametrize("format_code", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 67])
def test_a_product_is_that_of_the_dequantised_operands(
    native: Native, format_code: int, rows: int, columns: int, num_rows: int, halves: int
) -> None:
    columns = columns_for(format_code, columns)
    weight = random_weight(native, format_code, rows, columns)
    x = random_activations(num_rows, columns, halves)
    actual = linear(native, weight, x)
    assert_close(actual, weight.floats(native), x.floats(format_code in QUANTISED))


@pytest.mark.parametrize("format_code", [Q4, F32])
@pytest.mark.parametrize("rows", [5, 16, 33, 64])
def test_bias_and_what_was_there_are_added_last_and_nothing_else_is_written(
    native: Native, random: np.random.Generator, format_code: int, rows: int, halves: int
) -> None:
    bias = random.standard_normal(rows, np.float32)
    x = random_activations(6, 64, halves)
    plain = random_weight(native, format_code, rows, 64)
    biased = random_weight(native, format_code, rows, 64, bias)
    product = linear(native, plain, x)
    out = random.standard_normal((6, rows + 40), np.float32)
    before = out.copy()
    native.run(6, "tl_add_linear", x.rows, biased.matrix, 1, address(out), out.shape[1])
    assert same_bits(out[:, :rows], (product + bias) + before[:, :rows])
    assert same_bits(out[:, rows:], before[:, rows:])
    native.run(6, "tl_add_linear", x.rows, biased.matrix, 0, address(out), out.shape[1])
    assert same_bits(out[:, :rows], product + bias)
    assert same_bits(out[:, rows:], before[:, rows:])


@pytest.mark.parametrize("format_code", FORMATS)
def test_all_builds_give_the_same_bits(
    natives: dict[str, Native], format_code: int, halves: int
) -> None:
    for rows, columns in SHAPES:
        for num_rows in (1, 3, 66):
            columns = columns_for(format_code, columns)
            x = random_activations(num_rows, columns, halves)
            results = [
                linear(native, random_weight(native, format_code, rows, columns), x)
                for native in natives.values()
            ]
            assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("format_code", FORMATS)
def test_a_row_does_not_depend_on_the_rows_that_come_with_it(
    native: Native, format_code: int, halves: int
) -> None:
    columns = columns_for(format_code, 96)
    weight = random_weight(native, format_code, 48, columns)
    x = random_activations(70, columns, halves)
    alone = np.concatenate([linear(native, weight, x.part(slice(i, i + 1))) for i in range(70)])
    for num_rows in range(2, 71):
        batch = linear(native, weight, x.part(slice(70 - num_rows, 70)))
        assert same_bits(batch, alone[70 - num_rows :])


@pytest.mark.parametrize("format_code", [Q4, Q8, BF16])
def test_threads_make_no_difference(native: Native, format_code: int, halves: int) -> None:
    columns = columns_for(format_code, 256)
    weight = random_weight(native, format_code, 1008, columns)
    name = native.library.tl_instruction_set().decode()
    for num_rows in (1, 130):
        x = random_activations(num_rows, columns, halves)
        expected = linear(native, weight, x)
        for num_threads in (1, 3):
            other = open_native(name, num_threads)
            assert same_bits(linear(other, weight, x), expected)
            other.library.tl_pool_delete(other.pool)


@pytest.mark.parametrize("format_code", FORMATS)
def test_a_row_with_nan_spoils_no_other(native: Native, format_code: int, halves: int) -> None:
    columns = columns_for(format_code, 96)
    weight = random_weight(native, format_code, 48, columns)
    x = random_activations(9, columns, halves)
    expected = linear(native, weight, x)
    x.values[4, 40], x.scales[4, 1], x.sums[4, 1] = np.nan, np.nan, np.nan
    x.quantised[4, :, 32:64] = 0
    actual = linear(native, weight, x)
    assert np.isnan(actual[4]).all()
    others = np.arange(9) != 4
    assert same_bits(actual[others], expected[others])


@pytest.mark.parametrize("format_code", QUANTISED)
def test_groups_of_zeros_add_nothing(native: Native, format_code: int, halves: int) -> None:
    columns = columns_for(format_code, 256)
    weight = random_weight(native, format_code, 20, columns)
    values = np.zeros((3, columns), np.float32)
    assert not linear(native, weight, quantised(values, halves)).any()
    values[1, 32:64] = 1e-3
    x = quantised(values, halves)
    assert_close(linear(native, weight, x), weight.floats(native), x.floats(True))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_values_do_not_overflow(native: Native, sign: int, halves: int) -> None:
    most = most_quantised(halves)
    x = quantised(np.full((5, 64), sign * most, np.float32), halves)
    four_bit = np.zeros((16, 2, 20), np.uint8)
    four_bit[..., :2] = np.ones(1, np.float16).view(np.uint8)
    four_bit[..., 4:] = 0xFF
    weight = pack(native, Q4, SOURCE_Q4_1, four_bit.reshape(16, -1), 64)
    assert np.all(linear(native, weight, x) == sign * 64 * 15 * most)
    eight_bit = np.zeros((16, 2, 34), np.uint8)
    eight_bit[..., :2] = np.ones(1, np.float16).view(np.uint8)
    eight_bit[..., 2:] = 0x80
    weight = pack(native, Q8, SOURCE_Q8_0, eight_bit.reshape(16, -1), 64)
    assert np.all(linear(native, weight, x) == -sign * 64 * 128 * most)


@pytest.mark.parametrize("format_code", FORMATS)
@pytest.mark.parametrize("rows", [64, 192])
@pytest.mark.parametrize("num_rows", [1, 7, 65])
def test_a_gated_product_is_silu_of_one_times_the_other(
    native: Native, format_code: int, rows: int, num_rows: int, halves: int
) -> None:
    columns = columns_for(format_code, 96)
    weight = random_weight(native, format_code, rows, columns)
    x = random_activations(num_rows, columns, halves)
    out = gated_linear(native, weight, x)
    gate, up = np.split(linear(native, weight, x).astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(out.values, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)
    expected = quantised(out.values, halves)
    np.testing.assert_array_equal(out.quantised, expected.quantised)
    assert same_bits(out.scales, expected.scales) and same_bits(out.sums, expected.sums)


@pytest.mark.parametrize("format_code", FORMATS)
def test_gated_bits_depend_on_neither_build_nor_batch(
    natives: dict[str, Native], format_code: int, halves: int
) -> None:
    columns = columns_for(format_code, 96)
    x = random_activations(66, columns, halves)
    weights = {
        name: random_weight(native, format_code, 128, columns) for name, native in natives.items()
    }
    first, *others = (gated_linear(natives[name], weights[name], x) for name in natives)
    for other in others:
        assert same_bits(other.values, first.values)
        assert same_bits(other.quantised, first.quantised)
    for name, native in natives.items():
        for rows in (slice(0, 1), slice(65, 66), slice(3, 40)):
            part = gated_linear(native, weights[name], x.part(rows))
            assert same_bits(part.values, first.values[rows])
            assert same_bits(part.sums, first.sums[rows])


def test_gated_forms_that_nobody_wants_are_not_written(native: Native, halves: int) -> None:
    weight = random_weight(native, Q4, 64, 64)
    x = random_activations(3, 64, halves)
    expected = gated_linear(native, weight, x)
    out = empty_activations(3, 32, halves)
    values_only = library.Rows(address(out.values), 32)
    native.run(3, "tl_add_gated_linear", x.rows, weight.matrix, values_only)
    assert same_bits(out.values, expected.values)
    quantised_only = library.Rows(
        None, 0, *map(address, (out.quantised, out.scales, out.sums)), halves
    )
    native.run(3, "tl_add_gated_linear", x.rows, weight.matrix, quantised_only)
    assert same_bits(out.quantised, expected.quantised)
    assert same_bits(out.scales, expected.scales)


def test_a_gate_that_is_nan_spoils_its_row_alone(native: Native, halves: int) -> None:
    weight = random_weight(native, Q4, 64, 64)
    x = random_activations(3, 64, halves)
    expected = gated_linear(native, weight, x)
    x.scales[1, 0] = x.sums[1, 0] = np.nan
    actual = gated_linear(native, weight, x)
    assert np.isnan(actual.values[1]).all() and np.isnan(actual.scales[1]).all()
    assert same_bits(actual.values[::2], expected.values[::2])
    assert same_bits(actual.scales[::2], expected.scales[::2])
