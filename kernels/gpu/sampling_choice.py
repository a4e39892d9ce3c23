"""From what was measured of a row to its token: the last of the sampler's kernels.

A row's candidates were listed where they are few enough; else the whole row is its own list, which
takes longer and gives the same token.
"""

import triton
import triton.language as tl

from kernels.gpu.philox import bits_of
from kernels.gpu.sampling_draw import (
    GREEDY,
    NO_TOKEN,
    PLAIN,
    best_of,
    kind_of,
    no_winner,
    smallest_at,
)
from kernels.gpu.sampling_threshold import (
    ALL_LEVEL,
    LEVELS,
    UNROLLED,
    choose_level,
    counts_and_masses,
    float_of,
    key_of,
    of_all_segments,
    picked,
    rounded_up,
    steps_between,
    weigh,
)


@triton.jit
def _load_list(tokens, places):
    """Logits and token ids of places in the list; -inf beyond its end.

    `tokens` are a row and its size, and a list, its ids and its size: one of the sizes is 0.
    """
    row, row_size, listed, listed_ids, list_size = tokens
    in_row, in_list = places < row_size, places < list_size
    from_row = tl.load(row + places, mask=in_row, other=float("-inf"))
    from_list = tl.load(listed + places, mask=in_list, other=float("-inf"))
    ids = tl.load(listed_ids + places, mask=in_list, other=0)
    return tl.where(in_list, from_list, from_row), tl.where(in_list, ids, places)


@triton.jit
def _search(tokens, scale, low, high, wanted, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """Narrows two bounds to the keys between which the ranking comes to weigh `wanted`.

    A bound is (key, count, mass) of all tokens that reach the key; low weighs at least `wanted`,
    high less. In the end one token lies between them, or several with equal logits.
    """
    largest, temperature = scale
    low_key, low_count, low_mass = low
    high_key, high_count, high_mass = high
    lanes = tl.arange(0, LEVELS)
    while (high_key - low_key > 1) & (low_count - high_count > 1):
        keys = steps_between(low_key, high_key)
        thresholds = float_of(keys.to(tl.int32))[:, None]
        weights = tl.zeros([LEVELS, TILE], tl.int64)
        for start in tl.range(0, tokens[1] + tokens[4], TILE, loop_unroll_factor=UNROLLED):
            logits, _ = _load_list(tokens, start + tl.arange(0, TILE)[None, :])
            weights += weigh(logits, thresholds, largest, temperature)
        counts, masses = counts_and_masses(weights)
        is_enough = (masses if BY_MASS else counts) >= wanted
        # Of the first keys only: they weigh less and less.
        num_enough = tl.sum(is_enough.to(tl.int32), 0)
        last, first = lanes == num_enough - 1, lanes == num_enough
        has_last, has_first = num_enough > 0, num_enough < LEVELS
        low_key = tl.where(has_last, picked(keys, last), low_key)
        low_count = tl.where(has_last, picked(counts, last), low_count)
        low_mass = tl.where(has_last, picked(masses, last), low_mass)
        high_key = tl.where(has_first, picked(keys, first), high_key)
        high_count = tl.where(has_first, picked(counts, first), high_count)
        high_mass = tl.where(has_first, picked(masses, first), high_mass)
    return (low_key, low_count, low_mass), (high_key, high_count, high_mass)


@triton.jit
def _id_of_tie(tokens, logit, wanted, TILE: tl.constexpr):
    """The id of the token that is number `wanted`, from 1, of those with this logit."""
    found = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int32)
    for start in range(0, tokens[1] + tokens[4], TILE):
        logits, ids = _load_list(tokens, start + tl.arange(0, TILE))
        is_tie = logits == logit
        places = passed + tl.cumsum(is_tie.to(tl.int32), 0)
        found = tl.maximum(found, tl.max(tl.where(is_tie & (places == wanted), ids, 0), 0))
        passed += tl.sum(is_tie.to(tl.int32), 0)
    return found


@triton.jit
def _mass_of_each(low, high):
    """Of the tokens between two bounds, which are equal."""
    return tl.maximum((low[2] - high[2]) // tl.maximum(low[1] - high[1], 1), 1)


@triton.jit
def _cut(tokens, scale, least, measured, top_k, top_p, TILE: tl.constexpr):
    """Where the ranking ends: a logit, and the last id that still belongs to it with that logit.

    `measured` are count and mass of the tokens that reach `least`, then of all.
    """
    count, mass, count_of_all, mass_of_all = measured
    low = (key_of(least).to(tl.int64), count, mass)
    top = (key_of(scale[0]).to(tl.int64) + 1, count * 0, mass * 0)
    high = top
    # So many of the tokens between low and high belong to the ranking: all, or they are equal.
    ties = count
    share = mass_of_all
    if (top_k > 0) & (top_k < count_of_all):
        share = mass
        if top_k < count:
            low, high = _search(tokens, scale, low, high, top_k, False, TILE)
            ties = top_k - high[1]
            share = high[2] + ties * _mass_of_each(low, high)
    if top_p < 1.0:
        wanted = rounded_up(top_p.to(tl.float64) * share.to(tl.float64))
        if wanted <= high[2]:
            ties = high[1]
            low = high
            high = top
        wanted = tl.minimum(wanted, low[2])
        low, high = _search(tokens, scale, low, high, wanted, True, TILE)
        each = _mass_of_each(low, high)
        ties = tl.minimum(ties, (wanted - high[2] + each - 1) // each)
    logit = float_of(low[0].to(tl.int32))
    last_id = tl.full((), NO_TOKEN, tl.int32)
    if ties < low[1] - high[1]:
        last_id = _id_of_tie(tokens, logit, ties, TILE)
    return logit, last_id


@triton.jit
def _draw(tokens, temperature, least, last_id, seed, position, TILE: tl.constexpr):
    """Gumbel-max over the tokens with larger logits than `least`, or that and ids to last_id."""
    score, winner, bar = no_winner()
    for start in range(0, tokens[1] + tokens[4], TILE):
        logits, ids = _load_list(tokens, start + tl.arange(0, TILE))
        is_kept = (logits > least) | ((logits == least) & (ids <= last_id))
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            bits = bits_of(ids, seed, position)
            score, winner, bar = best_of(
                logits, ids, bits, is_kept, temperature, seed, position, score, winner, bar
            )
    return winner


@triton.jit(do_not_specialize=["num_segments"])
def choose_kernel(
    logits,
    row_stride,
    vocab_size,
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
    thresholds,
    counts,
    masses,
    listed,
    listed_ids,
    out,
    num_segments,
    SEGMENTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token of a row; programs [n]."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    kind = kind_of(temperature, tl.load(min_ps + row), top_k, top_p)
    segments = tl.arange(0, SEGMENTS)
    parts = row * num_segments + segments
    is_part = segments < num_segments
    all_maxima = tl.load(maxima + parts, mask=is_part, other=float("-inf"))
    largest = tl.max(all_maxima, 0)
    if (largest == float("inf")) | (largest == float("-inf")):
        tl.store(out + row, -1)
    elif kind == GREEDY:
        ids = tl.load(likeliest + parts, mask=is_part, other=NO_TOKEN)
        tl.store(out + row, smallest_at(all_maxima, largest, ids).to(tl.int64))
    elif kind == PLAIN:
        all_scores = tl.load(scores + parts, mask=is_part, other=float("-inf"))
        ids = tl.load(winners + parts, mask=is_part, other=NO_TOKEN)
        best = tl.max(all_scores, 0)
        tl.store(out + row, smallest_at(all_scores, best, ids).to(tl.int64))
    else:
        all_counts, all_masses = of_all_segments(counts, masses, parts, is_part)
        level = choose_level(all_counts, all_masses, top_k, top_p)
        measured = _measured_at(level, all_counts, all_masses)
        is_listed = measured[0] <= CAPACITY
        list_size = tl.where(is_listed, measured[0].to(tl.int32), 0)
        row_size = tl.where(is_listed, 0, vocab_size)
        first = row * CAPACITY
        own_row = logits + row * row_stride
        tokens = (own_row, row_size, listed + first, listed_ids + first, list_size)
        least = tl.load(thresholds + row * LEVELS + level)
        least, last_id = _cut(tokens, (largest, temperature), least, measured, top_k, top_p, TILE)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        winner = _draw(tokens, temperature, least, last_id, seed, position, TILE)
        tl.store(out + row, winner.to(tl.int64))


@triton.jit
def _measured_at(level, counts, masses):
    """Count and mass of the tokens that reach a level, then of all."""
    levels = tl.arange(0, LEVELS)
    is_it, is_all = levels == level, levels == ALL_LEVEL
    return (
        picked(counts, is_it),
        picked(masses, is_it),
        picked(counts, is_all),
        picked(masses, is_all),
    )
