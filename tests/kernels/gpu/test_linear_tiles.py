"""How a linear layer's work is cut: all of it once; in the invariant mode by the weight alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.linear_tiles import (
    INVARIANT_TILE,
    LARGE_TILE,
    SMALL_TILE,
    choose_parts,
    choose_tile,
)

TILES = st.sampled_from([SMALL_TILE, LARGE_TILE, INVARIANT_TILE])
ROWS, OUTPUTS, STEPS = st.integers(1, 9000), st.integers(1, 300000), st.integers(1, 500)
PROCESSORS = st.sampled_from([108, 132, 304])


@given(TILES, ROWS, OUTPUTS, STEPS, PROCESSORS, st.booleans())
def test_parts_cover_all_steps_and_none_is_empty(
    tile, rows, outputs, steps, processors, batch_invariant
) -> None:
    parts = choose_parts(tile, rows, outputs, steps, processors, batch_invariant)
    assert (parts.number - 1) * parts.steps < steps <= parts.number * parts.steps
    assert parts.number > 1 or not parts.is_spread


@given(TILES, ROWS, OUTPUTS, STEPS, PROCESSORS, st.booleans())
def test_parts_of_their_own_programs_fit_on_the_device_at_once(
    tile, rows, outputs, steps, processors, batch_invariant
) -> None:
    parts = choose_parts(tile, rows, outputs, steps, processors, batch_invariant)
    if parts.is_spread:
        programs = -(-rows // tile.rows) * -(-outputs // tile.outputs) * parts.number
        assert programs <= processors * tile.programs_per_processor


@given(TILES, ROWS, OUTPUTS, STEPS, PROCESSORS)
def test_in_the_invariant_mode_the_cut_does_not_depend_on_the_rows(
    tile, rows, outputs, steps, processors
) -> None:
    alone = choose_parts(tile, 1, outputs, steps, processors, True)
    parts = choose_parts(tile, rows, outputs, steps, processors, True)
    assert (parts.number, parts.steps) == (alone.number, alone.steps)
    assert choose_tile(rows, True) == choose_tile(1, True)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(("outputs", "columns"), [(4096, 4096), (6144, 4096), (4096, 14336)])
def test_decode_fills_an_h200(rows, outputs, columns) -> None:
    tile = choose_tile(rows, False)
    parts = choose_parts(tile, rows, outputs, columns // 256, 132, False)
    programs = -(-outputs // tile.outputs) * parts.number
    assert programs >= 0.7 * 132 * tile.programs_per_processor
