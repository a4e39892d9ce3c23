"""Which tile a linear layer's program works on, and into how many parts the columns are cut.

Few rows are bound by memory: what counts is that all of the device reads weights at once, and that
a weight costs few instructions. A program is then small, and where outputs alone do not make enough
of them, columns are cut into parts for several to work on. Many rows are bound by arithmetic: the
more of them share a dequantised weight, the better.
"""

from dataclasses import dataclass

import torch

# Shared memory that the largest tile takes of a device that multiplies out of it, as Hopper does.
_LARGEST_TILE_BYTES = 152 * 1024


@dataclass(frozen=True, slots=True)
class LinearTile:
    """What one program works on, and how."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    # So many programs keep a processor of the device busy: that many fit its registers.
    programs_per_processor: int
    # A program's first loads come late: fewer steps are not worth one of its own.
    fewest_steps: int
    # Weights are dequantised before they are multiplied.
    scales_first: bool = True


# Of quantised weights. Two warps, which a Hopper does not join to one of its large products, take
# two thirds of the instructions that four would.
EIGHT_ROWS = LinearTile(8, 64, 2, 3, programs_per_processor=4, fewest_steps=2, scales_first=False)
SIXTEEN_ROWS = LinearTile(
    16, 64, 2, 3, programs_per_processor=3, fewest_steps=2, scales_first=False
)
MORE_ROWS = LinearTile(64, 128, 8, 2, programs_per_processor=1, fewest_steps=4)
MANY_ROWS = LinearTile(128, 128, 8, 2, programs_per_processor=1, fewest_steps=4)
QUANTISED_TILES = (EIGHT_ROWS, SIXTEEN_ROWS, MORE_ROWS, MANY_ROWS)
# Of the batch-invariant modes, whatever the rows.
INVARIANT_TILE = MORE_ROWS
INVARIANT_DENSE_TILE = LinearTile(64, 128, 4, 3, programs_per_processor=1, fewest_steps=4)


@dataclass(frozen=True, slots=True)
class LinearDevice:
    """What a device has for these products: its multiprocessors, and the tiles that it can do."""

    num_processors: int
    fewest_rows: int  # that its matrix unit takes
    most_rows: int  # that its shared memory has room for


# An H100 or H200, which the CPU is taken for where kernels are interpreted.
REHEARSED_DEVICE = LinearDevice(132, 8, 128)


@dataclass(frozen=True, slots=True)
class Parts:
    """How the columns' steps are cut; with `is_spread` each part has programs of its own."""

    number: int
    steps: int
    is_spread: bool


def linear_device(device: torch.device) -> LinearDevice:
    """Of a GPU, or of the rehearsal on the CPU."""
    if device.type == "cpu":
        return REHEARSED_DEVICE
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return LinearDevice(properties.multi_processor_count, 16, 64)
    has_room = properties.shared_memory_per_block_optin >= _LARGEST_TILE_BYTES
    return LinearDevice(properties.multi_processor_count, 8, 128 if has_room else 64)


def choose_tile(num_rows: int, device: LinearDevice, batch_invariant: bool) -> LinearTile:
    """Of quantised weights: the smallest that holds the rows, or the largest."""
    if batch_invariant:
        return INVARIANT_TILE
    tiles = [tile for tile in QUANTISED_TILES if _can_do(device, tile)]
    return next((tile for tile in tiles if tile.rows >= num_rows), tiles[-1])


def _can_do(device: LinearDevice, tile: LinearTile) -> bool:
    return device.fewest_rows <= tile.rows <= device.most_rows


def choose_parts(
    tile: LinearTile,
    num_rows: int,
    num_outputs: int,
    num_steps: int,
    device: LinearDevice,
    batch_invariant: bool,
) -> Parts:
    """With `batch_invariant` the cut does not depend on the rows, only who works on the parts."""
    row_tiles = -(-num_rows // tile.rows)
    num_tiles = -(-num_outputs // tile.outputs) * (1 if batch_invariant else row_tiles)
    wanted = device.num_processors * tile.programs_per_processor // num_tiles
    number = max(1, min(wanted, num_steps // tile.fewest_steps))
    steps = -(-num_steps // number)
    number = -(-num_steps // steps)
    return Parts(number, steps, is_spread=number > 1 and not (batch_invariant and row_tiles > 1))
