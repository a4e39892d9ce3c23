"""How a linear layer's work is cut: all of it once; in the invariant mode by the weight alone."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.linear_tiles import (
    INVARIANT_DENSE_TILE,
    QUANTISED_TILES,
    REHEARSED_DEVICE,
    LinearDevice,
    choose_parts,
    choose_tile,
)

TILES = st.sampled_from([*QUANTISED_TILES, INVARIANT_DENSE_TILE])
ROWS, OUTPUTS, STEPS = st.integers(1, 9000), st.integers(1, 300000), st.integers(1, 500)
AMD = LinearDevice(304, 16, 64)
DEVICES = st.sampled_from([LinearDevice(108, 8, 64), REHEARSED_DEVICE, AMD])


@given(TILES, ROWS, OUTPUTS, STEPS, DEVICES, st.booleans())
def test_parts_cover_all_steps_and_none_is_empty(
    tile, rows, outputs, steps, device, batch_invariant
) -> None:
    parts = choose_parts(tile, rows, outputs, steps, device, batch_invariant)
    assert (parts.number - 1) * parts.steps < steps <= parts.number * parts.steps
    assert parts.number > 1 or not parts.is_spread


@given(TILES, ROWS, OUTPUTS, STEPS, DEVICES, st.booleans())
def test_parts_of_their_own_programs_fit_on_the_device_at_once(
    tile, rows, outputs, steps, device, batch_invariant
) -> None:
    parts = choose_parts(tile, rows, outputs, steps, device, batch_invariant)
    if parts.is_spread:
        programs = -(-rows // tile.rows) * -(-outputs // tile.outputs) * parts.number
        assert programs <= device.num_processors * tile.programs_per_processor


@given(TILES, ROWS, OUTPUTS, STEPS, DEVICES)
def test_in_the_invariant_mode_the_cut_does_not_depend_on_the_rows(
    tile, rows, outputs, steps, device
) -> None:
    alone = choose_parts(tile, 1, outputs, steps, device, True)
    parts = choose_parts(tile, rows, outputs, steps, device, True)
    assert (parts.number, parts.steps) == (alone.number, alone.steps)
    assert choose_tile(rows, device, True) == choose_tile(1, device, True)


@pytest.mark.parametrize(
    ("device", "expected"),
    [(REHEARSED_DEVICE, [8, 8, 16, 64, 128, 128]), (AMD, [16, 16, 16, 64, 64, 64])],
)
def test_a_tile_holds_the_rows_where_the_device_can_do_it(device, expected) -> None:
    tiles = [choose_tile(rows, device, False) for rows in (1, 8, 9, 17, 65, 8192)]
    assert [tile.rows for tile in tiles] == expected


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("outputs", "columns"), [(4096, 4096), (6144, 4096), (4096, 14336)])
def test_decode_fills_an_h200(rows, outputs, columns) -> None:
    tile = choose_tile(rows, REHEARSED_DEVICE, False)
    parts = choose_parts(tile, rows, outputs, columns // 256, REHEARSED_DEVICE, False)
    programs = -(-outputs // tile.outputs) * parts.number
    assert programs >= 0.7 * REHEARSED_DEVICE.num_processors * tile.programs_per_processor


def test_there_are_more_parts_on_a_larger_device_until_steps_run_out() -> None:
    tile = choose_tile(1, REHEARSED_DEVICE, False)
    twice = dataclasses.replace(REHEARSED_DEVICE, num_processors=264)
    parts = [choose_parts(tile, 1, 1024, 64, device, False) for device in (REHEARSED_DEVICE, twice)]
    assert [part.number for part in parts] == [32, 32]
    parts = [choose_parts(tile, 1, 4096, 64, device, False) for device in (REHEARSED_DEVICE, twice)]
    assert [part.number for part in parts] == [8, 16]
