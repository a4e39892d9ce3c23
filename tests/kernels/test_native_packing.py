"""Packing of weights by the native CPU library: what each source becomes, alike in every build."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.fakes.native_linear import (
    BF16,
    BLOCKS,
    F16,
    F32,
    FORMATS,
    GROUP,
    Q4,
    Q4_WIDE,
    Q8,
    SOURCE_BF16,
    SOURCE_F16,
    SOURCE_F32,
    SOURCE_Q4_0,
    SOURCE_Q4_1,
    SOURCE_Q4_K,
    Native,
    address,
    aligned,
    columns_for,
    pack,
    random_blocks,
    random_weight,
    same_bits,
)


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
