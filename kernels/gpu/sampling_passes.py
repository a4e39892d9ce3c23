"""The sampler's readings of the logits, each of a segment of a row: scan, measure, gather.

A segment is a fixed part of the vocabulary. The scan serves all rows, and is the only reading for
those that are greedy or draw from all tokens; the other two are for rows with filters.
"""

import triton
import triton.language as tl

from kernels.gpu.philox import bits_from
from kernels.gpu.sampling_draw import (
    FILTERED,
    PLAIN,
    best_of,
    is_number,
    kind_of,
    no_winner,
    smallest_at,
)
from kernels.gpu.sampling_threshold import (
    LEVELS,
    UNROLLED,
    choose_level,
    counts_and_masses,
    levels_of,
    of_all_segments,
    weigh,
)


@triton.jit(do_not_specialize=["first_token_id"])
def scan_kernel(
    logits,
    row_stride,
    vocab_size,
    first_token_id,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    seeds,
    positions,
    maxima,
    likeliest,
    scores,
    winners,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest logit and its first token, and the best noisy one; programs [n, segments].

    The largest is inf where there is a NaN. Of a row that is not drawn from all tokens there is no
    noisy one.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    kind = kind_of(temperature, tl.load(min_ps + row), tl.load(top_ks + row), tl.load(top_ps + row))
    lanes = tl.arange(0, TILE)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    places_of_largest = tl.zeros([TILE], tl.int32)
    score, winner, bar = no_winner()
    first = segment * SEGMENT
    for start in range(first, tl.minimum(first + SEGMENT, vocab_size), TILE):
        places = start + lanes
        values = tl.load(
            logits + row * row_stride + places, mask=places < vocab_size, other=float("-inf")
        )
        values = tl.where(values == values, values, float("inf"))
        is_larger = values > largest
        largest = tl.where(is_larger, values, largest)
        places_of_largest = tl.where(is_larger, places, places_of_largest)
        if kind == PLAIN:
            bits = bits_from(first_token_id + start, seed, position, TILE)
            ids, may_win = first_token_id + places, is_number(values)
            score, winner, bar = best_of(
                values, ids, bits, may_win, temperature, seed, position, score, winner, bar
            )
    most = tl.max(largest, 0)
    part = row * tl.num_programs(1) + segment
    tl.store(maxima + part, most)
    tl.store(likeliest + part, first_token_id + smallest_at(largest, most, places_of_largest))
    tl.store(scores + part, score)
    tl.store(winners + part, winner)


@triton.jit(do_not_specialize=["num_segments"])
def measure_kernel(
    logits,
    row_stride,
    vocab_size,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    maxima,
    thresholds,
    counts,
    masses,
    num_segments,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many tokens reach each level, and with which mass; programs [n, segments]."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    kind = kind_of(temperature, min_p, tl.load(top_ks + row), tl.load(top_ps + row))
    largest = largest_of_row(maxima, row, num_segments, SEGMENTS)
    if (kind == FILTERED) & is_number(largest):
        levels = tl.arange(0, LEVELS)
        reached = levels_of(largest, temperature, min_p)
        if segment == 0:
            # The next kernels must compare with the same bits.
            tl.store(thresholds + row * LEVELS + levels, reached)
        weights = tl.zeros([LEVELS, TILE], tl.int64)
        first = segment * SEGMENT
        end = tl.minimum(first + SEGMENT, vocab_size)
        for start in tl.range(first, end, TILE, loop_unroll_factor=UNROLLED):
            places = start + tl.arange(0, TILE)[None, :]
            values = tl.load(
                logits + row * row_stride + places, mask=places < vocab_size, other=float("-inf")
            )
            weights += weigh(values, reached[:, None], largest, temperature)
        count, mass = counts_and_masses(weights)
        places = (row * num_segments + segment) * LEVELS + levels
        tl.store(counts + places, count.to(tl.int32))
        tl.store(masses + places, mass)


@triton.jit(do_not_specialize=["num_segments"])
def gather_kernel(
    logits,
    row_stride,
    vocab_size,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    maxima,
    thresholds,
    counts,
    masses,
    listed,
    listed_ids,
    num_segments,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lists the tokens that can still be drawn, in the order of their ids; programs [n, segments].

    Nothing is listed of a row that has more than CAPACITY of them.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    kind = kind_of(tl.load(temperatures + row), tl.load(min_ps + row), top_k, top_p)
    if (kind == FILTERED) & is_number(largest_of_row(maxima, row, num_segments, SEGMENTS)):
        segments = tl.arange(0, SEGMENTS)
        parts, is_part = row * num_segments + segments, segments < num_segments
        all_counts, all_masses = of_all_segments(counts, masses, parts, is_part)
        level = choose_level(all_counts, all_masses, top_k, top_p)
        sizes = tl.load(counts + parts * LEVELS + level, mask=is_part, other=0)
        mine = tl.sum(tl.where(segments == segment, sizes, 0), 0)
        if (tl.sum(sizes, 0) <= CAPACITY) & (mine > 0):
            least = tl.load(thresholds + row * LEVELS + level)
            end = row * CAPACITY + tl.sum(tl.where(segments < segment, sizes, 0), 0)
            first = segment * SEGMENT
            for start in range(first, tl.minimum(first + SEGMENT, vocab_size), TILE):
                places = start + tl.arange(0, TILE)
                values = tl.load(
                    logits + row * row_stride + places,
                    mask=places < vocab_size,
                    other=float("-inf"),
                )
                is_listed = (values >= least).to(tl.int32)
                number = tl.sum(is_listed, 0)
                if number > 0:
                    targets = end + tl.cumsum(is_listed, 0) - 1
                    tl.store(listed + targets, values, mask=is_listed == 1)
                    tl.store(listed_ids + targets, places, mask=is_listed == 1)
                end += number


@triton.jit
def largest_of_row(maxima, row, num_segments, SEGMENTS: tl.constexpr):
    """Over all segments."""
    segments = tl.arange(0, SEGMENTS)
    parts = tl.load(
        maxima + row * num_segments + segments, mask=segments < num_segments, other=float("-inf")
    )
    return tl.max(parts, 0)
