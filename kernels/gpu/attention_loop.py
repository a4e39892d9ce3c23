"""What all attention kernels share: the online softmax over tiles of a sequence's keys.

A program holds a tile of query rows, several tokens times the query heads of one KV head, and reads
that head's keys and values tile by tile (Dao et al., 2022, after Milakov and Gimelshein, 2018). Of
a row it keeps the best score so far, m, the total of exp2(score - m), and the sum of values so
weighted; scores are in powers of two, so that the hardware's own exponential serves.

Tiles begin at multiples of their size, wherever the queries begin. A tile that a row sees nothing
of leaves the row's state as it was, bit for bit, and a tile computes the same masked or not: so a
row's result depends on its position alone, not on the rows that share its program. Products and
sums that the compiler could fuse in one place and not in another are fused by hand.
"""

import triton
import triton.language as tl
from triton import knobs

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# tanh is 1 in float32 long before.
_LARGEST_EXPONENT: tl.constexpr = tl.constexpr(64.0)
# Triton's interpreter multiplies matrices of bfloat16 as if they were integers, and cuts off what
# should be rounded to it: there all products are of float32.
_INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def find_sequence(cu_seqlens, tile, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence that query tile `tile` is of, by binary search.

    Sequence i has the tiles from cu_seqlens[i] // BLOCK_Q + i on, which is room enough for its
    tokens: its last tile may be empty, and is at the latest one before the next sequence's first.
    """
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(cu_seqlens + middle).to(tl.int32) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def table_row_of(sequence, rows, has_rows):
    """The sequence's row of seq_lens and block_table, int64."""
    row = tl.load(rows + sequence, mask=has_rows != 0, other=0).to(tl.int64)
    return tl.where(has_rows != 0, row, sequence.to(tl.int64))


@triton.jit
def tiles_in_sight(first_position, last_position, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The tiles [first, last) that hold what queries from first_ to last_position may see."""
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(first_position - WINDOW + 1, 0) // TILE
    return first_tile, tl.cdiv(last_position + 1, TILE)


@triton.jit
def splits_in_sight(
    seq_len, num_splits, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLIT_TILES: tl.constexpr,
    MIN_TILES: tl.constexpr,
):  # fmt: skip
    """How the keys of a sequence's last query are split.

    Returns the tiles [first, last) in sight, where split 0 begins, the tiles of a split, and the
    splits [first, last) to compute: with SPLIT_TILES those that hold any tile in sight, else all,
    of which the last may be empty.
    """
    first_tile, last_tile = tiles_in_sight(seq_len - 1, seq_len - 1, TILE, WINDOW)
    if SPLIT_TILES > 0:
        first_split = first_tile // SPLIT_TILES
        return first_tile, last_tile, 0, SPLIT_TILES, first_split, tl.cdiv(last_tile, SPLIT_TILES)
    else:
        per_split = tl.maximum(tl.cdiv(last_tile - first_tile, num_splits), MIN_TILES)
        return first_tile, last_tile, first_tile, per_split, 0, num_splits


@triton.jit
def exponent_scales(scale, SOFT_CAP: tl.constexpr):
    """What products of query and key are multiplied with: before the soft cap, and at the end."""
    if SOFT_CAP > 0:
        return scale * (2.0 * LOG2_E / SOFT_CAP), SOFT_CAP * LOG2_E
    else:
        return 1.0, scale * LOG2_E


@triton.jit
def _tanh(exponent):
    """tanh x, where exponent is 2 · log2(e) · x; as good near 0 as elsewhere, and NaN stays NaN.

    1 - 2 / (exp(2x) + 1) loses what x is smaller than 1: there it is its Taylor series, whose rest
    is below 1e-8 of it.
    """
    x = exponent * (0.5 / LOG2_E)
    square = x * x
    rest = tl.fma(square, 62.0 / 2835.0, -17.0 / 315.0)
    rest = tl.fma(square, rest, 2.0 / 15.0)
    rest = tl.fma(square, rest, -1.0 / 3.0)
    near = tl.fma(x * square, rest, x)
    # A comparison with NaN is false; a minimum would lose it.
    bounded = tl.where(exponent > _LARGEST_EXPONENT, _LARGEST_EXPONENT, exponent)
    far = 1.0 - 2.0 / (tl.exp2(bounded) + 1.0)
    return tl.where(square < 0.0625, near, far)


@triton.jit
def attend(
    query, query_position, first_position, last_position, keys, values, key_scales, value_scales,
    table, seq_len, scale, first_tile, last_tile, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, VALUE_TYPE: tl.constexpr, MASKS_ALL: tl.constexpr,
):  # fmt: skip
    """The state (best [M], total [M], sum [M, D]) of query rows after tiles [first, last).

    query [M, D], their positions [M] from first_ to last_position. keys, values and their scales
    point at the KV head in slot 0, `table` at the sequence's blocks. Only the tiles that some row
    does not see wholly are masked, those at the window's edge and those at the diagonal; or with
    MASKS_ALL every tile, which takes less code.
    """
    best = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    summed = tl.zeros([query.shape[0], query.shape[1]], tl.float32)
    block = load_blocks(table, first_tile, seq_len, BLOCK_SIZE, TILE)
    end = first_tile
    if not MASKS_ALL:
        begin = first_tile
        end = tl.minimum(tl.maximum((first_position + 1) // TILE, first_tile), last_tile)
        if WINDOW > 0:
            begin = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), TILE)
            begin = tl.minimum(tl.maximum(begin, first_tile), last_tile)
            end = tl.maximum(begin, end)
            best, total, summed, block = _attend_tiles(
                best, total, summed, block, query, query_position, keys, values, key_scales,
                value_scales, table, seq_len, scale, first_tile, begin, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, VALUE_TYPE, True,
            )  # fmt: skip
        best, total, summed, block = _attend_tiles(
            best, total, summed, block, query, query_position, keys, values, key_scales,
            value_scales, table, seq_len, scale, begin, end, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            TILE, WINDOW, SOFT_CAP, VALUE_TYPE, False,
        )  # fmt: skip
    best, total, summed, _ = _attend_tiles(
        best, total, summed, block, query, query_position, keys, values, key_scales, value_scales,
        table, seq_len, scale, end, last_tile, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE,
        WINDOW, SOFT_CAP, VALUE_TYPE, True,
    )  # fmt: skip
    return best, total, summed


@triton.jit
def load_blocks(table, tile, seq_len, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of each key of a tile; 0 beyond the sequence."""
    position = tile * TILE + tl.arange(0, TILE)
    return tl.load(table + position // BLOCK_SIZE, mask=position < seq_len, other=0)


@triton.jit
def _attend_tiles(
    best, total, summed, block, query, query_position, keys, values, key_scales, value_scales,
    table, seq_len, scale, first_tile, last_tile, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, VALUE_TYPE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, query.shape[1])
    cap_scale, exponent_scale = exponent_scales(scale, SOFT_CAP)
    for tile in range(first_tile, last_tile):
        position = tile * TILE + tl.arange(0, TILE)
        is_held = position < seq_len
        # In elements of int64: a cache has more than 2³¹.
        head = (block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * NUM_KV_HEADS
        key_places = keys + head[None, :] * HEAD_DIM + dims[:, None]
        value_places = values + head[:, None] * HEAD_DIM + dims[None, :]
        if IS_MASKED:
            # Slots beyond the sequence may hold NaN, which no weight of zero would make harmless.
            in_tile = is_held[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(key_places, mask=is_held[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
            value = tl.load(value_places, mask=in_tile, other=0.0)
        elif query.shape[1] > HEAD_DIM:
            key = tl.load(key_places, mask=(dims < HEAD_DIM)[:, None], other=0.0)
            value = tl.load(value_places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            key = tl.load(key_places)
            value = tl.load(value_places)
        block = load_blocks(table, tile + 1, seq_len, BLOCK_SIZE, TILE)
        if _INTERPRETED:
            score = tl.dot(query.to(tl.float32), key.to(tl.float32))
        else:
            score = tl.dot(query, key.to(query.dtype), input_precision="ieee")
        if key_scales is not None:
            score *= tl.load(key_scales + head, mask=is_held, other=0.0)[None, :]
        if SOFT_CAP > 0:
            score = _tanh(score * cap_scale)
        if IS_MASKED:
            is_seen = position[None, :] <= query_position[:, None]
            if WINDOW > 0:
                is_seen &= position[None, :] > query_position[:, None] - WINDOW
            score = tl.where(is_seen, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1) * exponent_scale)
        # A row that has seen nothing yet: -inf less -inf would be NaN.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(tl.fma(score, exponent_scale, -base[:, None]))
        decay = tl.exp2(best - base)
        best = new_best
        total = tl.fma(total, decay, tl.sum(weight, 1))
        if value_scales is not None:
            weight *= tl.load(value_scales + head, mask=is_held, other=0.0)[None, :]
        summed = summed * decay[:, None]
        if _INTERPRETED:
            summed = tl.dot(weight, value.to(tl.float32), summed)
        else:
            value = value.to(VALUE_TYPE)
            summed = tl.dot(weight.to(VALUE_TYPE), value, summed, input_precision="ieee")
    return best, total, summed, block


@triton.jit
def attend_in_splits(
    query, query_position, first_position, last_position, keys, values, key_scales, value_scales,
    table, seq_len, scale, first_tile, last_tile, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, VALUE_TYPE: tl.constexpr, SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """As `attend`, but each SPLIT_TILES tiles anew, and then merged with those before."""
    best = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    summed = tl.zeros([query.shape[0], query.shape[1]], tl.float32)
    for split in range(first_tile // SPLIT_TILES, tl.cdiv(last_tile, SPLIT_TILES)):
        other_best, other_total, other_summed = attend(
            query, query_position, first_position, last_position, keys, values, key_scales,
            value_scales, table, seq_len, scale, tl.maximum(split * SPLIT_TILES, first_tile),
            tl.minimum((split + 1) * SPLIT_TILES, last_tile), NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            TILE, WINDOW, SOFT_CAP, VALUE_TYPE, WINDOW > 0,
        )  # fmt: skip
        best, total, summed = merge_states(
            best, total, summed, other_best, other_total, other_summed
        )
    return best, total, summed


@triton.jit
def merge_states(best, total, summed, other_best, other_total, other_summed):
    """Of two sets of keys, the state of both."""
    new_best = tl.maximum(best, other_best)
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = tl.exp2(best - base)
    other_decay = tl.exp2(other_best - base)
    total = tl.fma(total, decay, other_total * other_decay)
    summed = tl.fma(summed, decay[:, None], other_summed * other_decay[:, None])
    return new_best, total, summed


@triton.jit
def attended(total, summed):
    """The rows' results: zeros for a row that has seen nothing."""
    return summed * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
