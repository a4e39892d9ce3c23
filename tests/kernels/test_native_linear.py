"""Packed weights and linear layers of the native CPU library, every build against plain arithmetic.

Builds give the same bits, and so do a row alone, in any batch, and any number of threads.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kernels.cpu import library
from tests.fakes.native_ops import runnable_instruction_sets

Q4, Q4_WIDE, Q8, F16, BF16, F32 = range(6)
SOURCE_F32, SOURCE_F16, SOURCE_BF16, SOURCE_Q4_0, SOURCE_Q4_1, SOURCE_Q4_K, SOURCE_Q8_0 = range(7)
BLOCKS = {
    SOURCE_Q4_0: (GGMLQuantizationType.Q4_0, Q4),
    SOURCE_Q4_1: (GGMLQuantizationType.Q4_1, Q4),
    SOURCE_Q4_K: (GGMLQuantizationType.Q4_K, Q4_WIDE),
    SOURCE_Q8_0: (GGMLQuantizationType.Q8_0, Q8),
}
# What a matrix of each format is packed from here.
SOURCES = {
    Q4: SOURCE_Q4_1,
    Q4_WIDE: SOURCE_Q4_K,
    Q8: SOURCE_F32,
    F16: SOURCE_F32,
    BF16: SOURCE_F32,
    F32: SOURCE_F32,
}
FORMATS = list(SOURCES)
QUANTISED = (Q4, Q4_WIDE, Q8)
GROUP = 32
# Rows, and columns for formats whose blocks have 32 columns; others take any number.
SHAPES = ((1, 32), (16, 64), (33, 96), (100, 320), (64, 1536))
BUILDS = runnable_instruction_sets()


@dataclass(frozen=True)
class Native:
    """One build with a pool of its own."""

    library: ctypes.CDLL
    pool: int

    def run(self, num_rows: int, add: str, *arguments: object) -> None:
        """Runs a program of one op on `num_rows` rows."""
        program = self.library.tl_program_new()
        getattr(self.library, add)(program, 0, *arguments)
        self.library.tl_program_run(program, self.pool, (ctypes.c_int64 * 4)(num_rows))
        self.library.tl_program_delete(program)


def open_native(name: str, num_threads: int = 2) -> Native:
    native = library.load(name)
    return Native(native, native.tl_pool_new(num_threads))


@pytest.fixture(scope="module")
def natives() -> Iterator[dict[str, Native]]:
    opened = {name: open_native(name) for name in BUILDS}
    yield opened
    for native in opened.values():
        native.library.tl_pool_delete(native.pool)


@pytest.fixture(params=BUILDS)
def native(request: pytest.FixtureRequest, natives: dict[str, Native]) -> Native:
    return natives[request.param]


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


@dataclass(frozen=True)
class Weight:
    """A packed matrix, and all that it points at."""

    format: int
    rows: int
    columns: int
    data: np.ndarray
    bias: np.ndarray | None = None

    @property
    def matrix(self) -> library.Matrix:
        return library.Matrix(
            self.format, self.rows, self.columns, address(self.data), address(self.bias)
        )

    def floats(self, native: Native) -> np.ndarray:
        out = np.empty((self.rows, self.columns), np.float32)
        native.library.tl_unpack(self.matrix, 0, self.rows, address(out))
        return out


def aligned(num_bytes: int) -> np.ndarray:
    room = np.full(num_bytes + 64, 0xAA, np.uint8)
    return room[-room.ctypes.data % 64 :][:num_bytes]


def pack(
    native: Native,
    format_code: int,
    source_kind: int,
    source: np.ndarray,
    columns: int,
    order: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> Weight:
    rows = len(source) if order is None else len(order)
    data = aligned(native.library.tl_packed_bytes(format_code, rows, columns))
    result = native.library.tl_pack(
        *(format_code, source_kind, address(source), source.strides[0], address(order)),
        *(0, rows, rows, columns, address(data)),
    )
    assert result == 0
    return Weight(format_code, rows, columns, data, bias)


def random_blocks(
    random: np.random.Generator, source_kind: int, rows: int, columns: int
) -> np.ndarray:
    """Rows as a GGUF file holds them, uint8."""
    if source_kind == SOURCE_Q4_K:
        blocks = random.integers(0, 256, (rows, columns // 256, 144)).astype(np.uint8)
        scales = random.uniform(1e-4, 0.01, (rows, columns // 256, 2)).astype(np.float16)
        blocks[..., :4] = scales.view(np.uint8)
        return blocks.reshape(rows, -1)
    values = random.standard_normal((rows, columns), np.float32)
    return quantize(values, BLOCKS[source_kind][0])


def random_weight(
    native: Native,
    format_code: int,
    rows: int,
    columns: int,
    bias: np.ndarray | None = None,
    seed: int = 0,
) -> Weight:
    random = np.random.default_rng(seed)
    source_kind = SOURCES[format_code]
    if source_kind == SOURCE_F32:
        source = random.standard_normal((rows, columns), np.float32)
    else:
        source = random_blocks(random, source_kind, rows, columns)
    return pack(native, format_code, source_kind, source, columns, bias=bias)


def columns_for(format_code: int, columns: int) -> int:
    """As many, up to what the format's blocks need; floats get a ragged end."""
    if SOURCES[format_code] == SOURCE_Q4_K:
        return -(-columns // 256) * 256
    return columns if SOURCES[format_code] != SOURCE_F32 else columns - 3


@dataclass(frozen=True)
class Activations:
    """Rows in every form that TlRows has."""

    values: np.ndarray
    quantised: np.ndarray
    scales: np.ndarray
    sums: np.ndarray

    @property
    def rows(self) -> library.Rows:
        return library.Rows(
            address(self.values),
            self.values.strides[0] // 4,
            *map(address, (self.quantised, self.scales, self.sums)),
        )

    def part(self, rows: slice) -> "Activations":
        return Activations(
            self.values[rows], self.quantised[rows], self.scales[rows], self.sums[rows]
        )

    def floats(self, is_quantised: bool) -> np.ndarray:
        """What a linear layer reads, in float64."""
        if not is_quantised:
            return self.values.astype(np.float64)
        num_rows, columns = self.values.shape
        high, low = self.quantised.astype(np.float64).swapaxes(0, 1)
        groups = (255 * high + low).reshape(num_rows, -1, GROUP)
        return (groups * self.scales[..., None]).reshape(num_rows, -1)[:, :columns]


def quantised(values: np.ndarray) -> Activations:
    """As api.h says of TlRows."""
    num_rows, columns = values.shape
    padded = np.zeros((num_rows, -(-columns // GROUP), GROUP), np.float32)
    padded.reshape(num_rows, -1)[:, :columns] = values
    most = np.abs(padded).max(-1)
    scales = most / np.float32(32512)
    inverse = np.divide(np.float32(32512), most, out=np.zeros_like(most), where=most > 0)
    steps = np.rint(padded * inverse[..., None])
    sums = scales * steps.sum(-1, dtype=np.float32)
    steps = steps.reshape(num_rows, -1)
    high = np.rint(steps / 255)
    halves = np.stack([high, steps - 255 * high], 1).astype(np.int8)
    return Activations(values, halves, scales, sums)


def random_activations(num_rows: int, columns: int, seed: int = 1) -> Activations:
    return quantised(np.random.default_rng(seed).standard_normal((num_rows, columns), np.float32))


def empty_activations(num_rows: int, columns: int) -> Activations:
    groups = columns // GROUP
    return Activations(
        np.empty((num_rows, columns), np.float32),
        np.empty((num_rows, 2, columns), np.int8),
        np.empty((num_rows, groups), np.float32),
        np.empty((num_rows, groups), np.float32),
    )


def linear(native: Native, weight: Weight, x: Activations) -> np.ndarray:
    out = np.full((len(x.values), weight.rows), np.nan, np.float32)
    native.run(len(out), "tl_add_linear", x.rows, weight.matrix, 0, address(out), weight.rows)
    return out


def gated_linear(native: Native, weight: Weight, x: Activations) -> Activations:
    out = empty_activations(len(x.values), weight.rows // 2)
    native.run(len(out.values), "tl_add_gated_linear", x.rows, weight.matrix, out.rows)
    return out


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.tobytes() == right.tobytes()


def assert_close(actual: np.ndarray, weight: np.ndarray, x: np.ndarray) -> None:
    """`actual` is x · weightᵀ up to the rounding of sums in float32."""
    expected = x @ weight.T.astype(np.float64)
    magnitudes = np.abs(x) @ np.abs(weight.T.astype(np.float64))
    assert np.all(np.abs(actual - expected) <= 4e-6 * magnitudes + 1e-30)


# --------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("source_kind", BLOCKS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_blocks_of_gguf_files_are_kept_exactly(
    native: Native, random: np.random.Generator, source_kind: int, rows: int
) -> None:
    blocks = random_blocks(random, source_kind, rows, 512)
    kind, format_code = BLOCKS[source_kind]
    weight = pack(native, format_code, source_kind, blocks, 512)
    np.testing.assert_array_equal(weight.floats(native), dequantize(blocks, kind))


def test_rows_are_packed_in_the_order_that_is_asked_for(
    native: Native, random: np.random.Generator
) -> None:
    blocks = random_blocks(random, SOURCE_Q4_1, 40, 64)
    order = random.permutation(40)[:37].astype(np.int64)
    weight = pack(native, Q4, SOURCE_Q4_1, blocks, 64, order)
    expected = dequantize(blocks, GGMLQuantizationType.Q4_1)[order]
    np.testing.assert_array_equal(weight.floats(native), expected)


def test_parts_of_a_matrix_can_be_packed_one_by_one(
    native: Native, random: np.random.Generator
) -> None:
    blocks = random_blocks(random, SOURCE_Q4_0, 53, 96)
    whole = pack(native, Q4, SOURCE_Q4_0, blocks, 96)
    data = aligned(len(whole.data))
    for first in (32, 0, 16, 48):
        part = blocks[first : first + 16]
        result = native.library.tl_pack(
            *(Q4, SOURCE_Q4_0, address(part), part.strides[0], None),
            *(first, len(part), 53, 96, address(data)),
        )
        assert result == 0
    assert same_bits(data, whole.data)


@pytest.mark.parametrize("columns", [1, 31, 64, 100])
def test_floats_are_rounded_once(native: Native, random: np.random.Generator, columns: int) -> None:
    values = random.standard_normal((19, columns), np.float32) * np.float32(1e-3)
    bits = values.view(np.uint32)
    halves = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    brain = (halves.astype(np.uint32) << 16).view(np.float32)
    exact = pack(native, F32, SOURCE_F32, values, columns).floats(native)
    np.testing.assert_array_equal(exact, values)
    half = values.astype(np.float16)
    for source_kind, source in ((SOURCE_F32, values), (SOURCE_F16, half)):
        packed = pack(native, F16, source_kind, source, columns).floats(native)
        np.testing.assert_array_equal(packed, half.astype(np.float32))
    for source_kind, source in ((SOURCE_F32, values), (SOURCE_BF16, halves)):
        packed = pack(native, BF16, source_kind, source, columns).floats(native)
        np.testing.assert_array_equal(packed, brain)


@pytest.mark.parametrize("columns", [1, 31, 64, 100])
def test_int8_is_the_nearest_multiple_of_a_float16_scale(
    native: Native, random: np.random.Generator, columns: int
) -> None:
    values = random.standard_normal((19, columns), np.float32)
    values[3, :32] = 0
    packed = pack(native, Q8, SOURCE_F32, values, columns).floats(native)
    padded = np.zeros((19, -(-columns // GROUP), GROUP), np.float32)
    padded.reshape(19, -1)[:, :columns] = values
    scales = (np.abs(padded).max(-1) / np.float32(127)).astype(np.float16).astype(np.float64)
    steps = np.rint(padded / np.where(scales == 0, 1, scales)[..., None]).clip(-127, 127)
    nearest = (steps * scales[..., None]).reshape(19, -1)[:, :columns]
    # The library multiplies by 1 / scale: a value half-way between steps may go either way.
    off = np.abs(packed - nearest)
    assert np.mean(off > 0) < 0.01
    spread = np.repeat(scales, GROUP, axis=1)[:, :columns]
    assert np.all(np.abs(packed - values) <= 0.5001 * spread + 127 * spread * 2**-11)


def test_a_weight_that_is_not_finite_spoils_its_group_alone(native: Native) -> None:
    values = np.ones((17, 96), np.float32)
    values[16, 40], values[2, 0] = np.inf, np.nan
    packed = pack(native, Q8, SOURCE_F32, values, 96).floats(native)
    spoilt = np.isnan(packed)
    assert spoilt[16, 32:64].all() and spoilt[2, :32].all() and spoilt.sum() == 64


def test_sources_that_do_not_fit_a_format_are_refused(native: Native) -> None:
    source, data = np.zeros(4096, np.uint8), aligned(1 << 16)

    def result(format_code: int, source_kind: int, columns: int, first_row: int = 0) -> int:
        return native.library.tl_pack(
            *(format_code, source_kind, address(source), 0, None),
            *(first_row, 1, 32, columns, address(data)),
        )

    assert result(Q4, SOURCE_Q4_1, 64) == 0
    assert result(Q8, SOURCE_Q4_1, 64) == -1
    assert result(Q4, SOURCE_Q4_K, 256) == -1
    assert result(Q4, SOURCE_F32, 64) == -1
    assert result(Q4_WIDE, SOURCE_Q4_0, 64) == -1
    assert result(Q4, SOURCE_Q4_1, 65) == -1
    assert result(Q4_WIDE, SOURCE_Q4_K, 64) == -1
    assert result(Q4, SOURCE_Q4_1, 64, first_row=8) == -1
    # -8 · scale is beyond float16.
    source[:2] = np.array([30000], np.float16).view(np.uint8)
    assert result(Q4, SOURCE_Q4_0, 32) == -1


def test_all_builds_pack_the_same_bytes(natives: dict[str, Native]) -> None:
    for format_code in FORMATS:
        columns = columns_for(format_code, 96)
        packed = [random_weight(native, format_code, 21, columns) for native in natives.values()]
        assert all(same_bits(weight.data, packed[0].data) for weight in packed)


# ---------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("format_code", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 67])
def test_a_product_is_that_of_the_dequantised_operands(
    native: Native, format_code: int, rows: int, columns: int, num_rows: int
) -> None:
    columns = columns_for(format_code, columns)
    weight = random_weight(native, format_code, rows, columns)
    x = random_activations(num_rows, columns)
    actual = linear(native, weight, x)
    assert_close(actual, weight.floats(native), x.floats(format_code in QUANTISED))


@pytest.mark.parametrize("format_code", [Q4, F32])
@pytest.mark.parametrize("rows", [5, 16, 33, 64])
def test_bias_and_what_was_there_are_added_last_and_nothing_else_is_written(
    native: Native, random: np.random.Generator, format_code: int, rows: int
) -> None:
    bias = random.standard_normal(rows, np.float32)
    x = random_activations(6, 64)
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
def test_all_builds_give_the_same_bits(natives: dict[str, Native], format_code: int) -> None:
    for rows, columns in SHAPES:
        for num_rows in (1, 3, 66):
            columns = columns_for(format_code, columns)
            x = random_activations(num_rows, columns)
            results = [
                linear(native, random_weight(native, format_code, rows, columns), x)
                for native in natives.values()
            ]
            assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("format_code", FORMATS)
def test_a_row_does_not_depend_on_the_rows_that_come_with_it(
    native: Native, format_code: int
) -> None:
    columns = columns_for(format_code, 96)
    weight = random_weight(native, format_code, 48, columns)
    x = random_activations(70, columns)
    alone = np.concatenate([linear(native, weight, x.part(slice(i, i + 1))) for i in range(70)])
    for num_rows in range(2, 71):
        batch = linear(native, weight, x.part(slice(70 - num_rows, 70)))
        assert same_bits(batch, alone[70 - num_rows :])


@pytest.mark.parametrize("format_code", [Q4, Q8, BF16])
def test_threads_make_no_difference(native: Native, format_code: int) -> None:
    columns = columns_for(format_code, 256)
    weight = random_weight(native, format_code, 1008, columns)
    name = native.library.tl_instruction_set().decode()
    for num_rows in (1, 130):
        x = random_activations(num_rows, columns)
        expected = linear(native, weight, x)
        for num_threads in (1, 3):
            other = open_native(name, num_threads)
            assert same_bits(linear(other, weight, x), expected)
            other.library.tl_pool_delete(other.pool)


@pytest.mark.parametrize("format_code", FORMATS)
def test_a_row_with_nan_spoils_no_other(native: Native, format_code: int) -> None:
    columns = columns_for(format_code, 96)
    weight = random_weight(native, format_code, 48, columns)
    x = random_activations(9, columns)
    expected = linear(native, weight, x)
    x.values[4, 40], x.scales[4, 1], x.sums[4, 1] = np.nan, np.nan, np.nan
    x.quantised[4, :, 32:64] = 0
    actual = linear(native, weight, x)
    assert np.isnan(actual[4]).all()
    others = np.arange(9) != 4
    assert same_bits(actual[others], expected[others])


@pytest.mark.parametrize("format_code", QUANTISED)
def test_groups_of_zeros_add_nothing(native: Native, format_code: int) -> None:
    columns = columns_for(format_code, 256)
    weight = random_weight(native, format_code, 20, columns)
    values = np.zeros((3, columns), np.float32)
    assert not linear(native, weight, quantised(values)).any()
    values[1, 32:64] = 1e-3
    x = quantised(values)
    assert_close(linear(native, weight, x), weight.floats(native), x.floats(True))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_values_do_not_overflow(native: Native, sign: int) -> None:
    x = quantised(np.full((5, 64), sign * 32512, np.float32))
    four_bit = np.zeros((16, 2, 20), np.uint8)
    four_bit[..., :2] = np.ones(1, np.float16).view(np.uint8)
    four_bit[..., 4:] = 0xFF
    weight = pack(native, Q4, SOURCE_Q4_1, four_bit.reshape(16, -1), 64)
    assert np.all(linear(native, weight, x) == sign * 64 * 15 * 32512)
    eight_bit = np.zeros((16, 2, 34), np.uint8)
    eight_bit[..., :2] = np.ones(1, np.float16).view(np.uint8)
    eight_bit[..., 2:] = 0x80
    weight = pack(native, Q8, SOURCE_Q8_0, eight_bit.reshape(16, -1), 64)
    assert np.all(linear(native, weight, x) == -sign * 64 * 128 * 32512)


# ---------------------------------------------------------------------------------- gated linear


@pytest.mark.parametrize("format_code", FORMATS)
@pytest.mark.parametrize("rows", [64, 192])
@pytest.mark.parametrize("num_rows", [1, 7, 65])
def test_a_gated_product_is_silu_of_one_times_the_other(
    native: Native, format_code: int, rows: int, num_rows: int
) -> None:
    columns = columns_for(format_code, 96)
    weight = random_weight(native, format_code, rows, columns)
    x = random_activations(num_rows, columns)
    out = gated_linear(native, weight, x)
    gate, up = np.split(linear(native, weight, x).astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(out.values, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)
    expected = quantised(out.values)
    np.testing.assert_array_equal(out.quantised, expected.quantised)
    assert same_bits(out.scales, expected.scales) and same_bits(out.sums, expected.sums)


@pytest.mark.parametrize("format_code", FORMATS)
def test_gated_bits_depend_on_neither_build_nor_batch(
    natives: dict[str, Native], format_code: int
) -> None:
    columns = columns_for(format_code, 96)
    x = random_activations(66, columns)
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


def test_gated_forms_that_nobody_wants_are_not_written(native: Native) -> None:
    weight = random_weight(native, Q4, 64, 64)
    x = random_activations(3, 64)
    expected = gated_linear(native, weight, x)
    out = empty_activations(3, 32)
    values_only = library.Rows(address(out.values), 32, None, None, None)
    native.run(3, "tl_add_gated_linear", x.rows, weight.matrix, values_only)
    assert same_bits(out.values, expected.values)
    quantised_only = library.Rows(None, 0, *map(address, (out.quantised, out.scales, out.sums)))
    native.run(3, "tl_add_gated_linear", x.rows, weight.matrix, quantised_only)
    assert same_bits(out.quantised, expected.quantised)
    assert same_bits(out.scales, expected.scales)


def test_a_gate_that_is_nan_spoils_its_row_alone(native: Native) -> None:
    weight = random_weight(native, Q4, 64, 64)
    x = random_activations(3, 64)
    expected = gated_linear(native, weight, x)
    x.scales[1, 0] = x.sums[1, 0] = np.nan
    actual = gated_linear(native, weight, x)
    assert np.isnan(actual.values[1]).all() and np.isnan(actual.scales[1]).all()
    assert same_bits(actual.values[::2], expected.values[::2])
    assert same_bits(actual.scales[::2], expected.scales[::2])
