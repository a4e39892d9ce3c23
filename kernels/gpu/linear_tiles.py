"""Which tile a linear layer's program works on, and into how many parts the columns are cut.

Few rows are bound by memory: what counts is that all of the device reads weights at once, and that
a weight costs few instructions. A program is then small, and where outputs alone do not make enough
of them, columns are cut into parts for several to work on. Many rows are bound by arithmetic.
"""

from dataclasses import dataclass

# A program's first loads come late: fewer steps than this are not worth one of its own.
_FEWEST_STEPS = 4


@dataclass(frozen=True, slots=True)
class LinearTile:
    """What one program works on, and how."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    # As many programs, on each of the device's processors, keep enough loads in flight.
    programs_per_processor: int


# Of quantised weights. By its registers and shared memory a processor of an H200 takes three.
SMALL_TILE = LinearTile(8, 64, num_warps=4, num_stages=3, programs_per_processor=2)
LARGE_TILE = LinearTile(64, 128, num_warps=8, num_stages=2, programs_per_processor=1)
# Of the batch-invariant product, whatever the rows.
INVARIANT_TILE = LinearTile(64, 128, num_warps=4, num_stages=3, programs_per_processor=1)


@dataclass(frozen=True, slots=True)
class Parts:
    """How the columns' steps are cut; with `is_spread` each part has programs of its own."""

    number: int
    steps: int
    is_spread: bool


def choose_tile(num_rows: int, batch_invariant: bool) -> LinearTile:
    """Of quantised weights."""
    return SMALL_TILE if num_rows <= SMALL_TILE.rows and not batch_invariant else LARGE_TILE


def choose_parts(
    tile: LinearTile,
    num_rows: int,
    num_outputs: int,
    num_steps: int,
    num_processors: int,
    batch_invariant: bool,
) -> Parts:
    """With `batch_invariant` the cut does not depend on the rows, only who works on the parts."""
    row_tiles = -(-num_rows // tile.rows)
    num_tiles = -(-num_outputs // tile.outputs) * (1 if batch_invariant else row_tiles)
    wanted = num_processors * tile.programs_per_processor // num_tiles
    number = max(1, min(wanted, num_steps // _FEWEST_STEPS))
    steps = -(-num_steps // number)
    number = -(-num_steps // steps)
    return Parts(number, steps, is_spread=number > 1 and not (batch_invariant and row_tiles > 1))
