"""In which order programs take the tiles of a product."""

import triton
import triton.language as tl

# Row tiles whose rows of x stay in a device's cache while one output tile follows the other.
_GROUP: tl.constexpr = tl.constexpr(16)


@triton.jit
def tile_place(tile, num_row_tiles, num_output_tiles):
    """Row tile and output tile of tile number `tile`: row tiles in groups, outputs inside."""
    group_size = _GROUP * num_output_tiles
    first_row_tile = tile // group_size * _GROUP
    group_rows = tl.minimum(num_row_tiles - first_row_tile, _GROUP)
    inside = tile % group_size
    return first_row_tile + inside % group_rows, inside // group_rows
