"""What min_p, top_k and top_p leave of a row, found by thresholds instead of a sort.

A threshold is a float, or its place among all floats in order, its key. How likely the tokens above
one are together is summed in integers: in any order, and over any parts of a row, to the same bits.
"""

import triton
import triton.language as tl

from kernels.gpu.philox import natural_log
from kernels.gpu.sampling_draw import LARGEST_FLOAT

# Thresholds that are measured in one reading.
LEVELS = tl.constexpr(8)
# Tiles that are on their way from memory together while they are measured.
UNROLLED = tl.constexpr(4)
# The level that all possible tokens reach, and the one that all reach which may be drawn: noise
# spans 26.1, so that a token more than 27 temperatures below the likeliest never wins. Together
# those weigh less than a vocabulary's 2^18 times e^-27, which is less than float32 can tell.
ALL_LEVEL = tl.constexpr(7)
_DEEPEST_LEVEL = tl.constexpr(6)
# Levels lie 2^0, 2^0.7925, 2^1.585, … 27 temperatures below the likeliest token.
_LEVEL_RATIO = tl.constexpr(0.7925)
# A mass is a multiple of 2^-44 of that of the likeliest: 2^18 of these still fit 63 bits.
_MASS_UNITS = tl.constexpr(float(2**44))
# A count lies above the mass of as many tokens.
_COUNT_SHIFT = tl.constexpr(54)
_ONE_TOKEN = tl.constexpr(2**54)
MOST_TILES = 2 ** (63 - 54) - 1


@triton.jit
def key_of(x):
    """Orders float32 as int32 does; -0 and 0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def picked(values, is_it):
    """The value in the one lane that `is_it`, or 0."""
    return tl.sum(tl.where(is_it, values, 0), 0)


@triton.jit
def rounded_up(x):
    """float64 of at least 0 -> the least int64 that is no less."""
    whole = x.to(tl.int64)
    return whole + (whole.to(tl.float64) < x).to(tl.int64)


@triton.jit
def min_p_bound(largest, temperature, min_p):
    """The least float32 that is min_p times as probable as the largest logit."""
    bound = largest.to(tl.float64) + temperature.to(tl.float64) * natural_log(
        tl.where(min_p > 0.0, min_p, 1.0).to(tl.float64)
    )
    bound = tl.maximum(bound, -LARGEST_FLOAT)
    nearest = bound.to(tl.float32)
    is_below = nearest.to(tl.float64) < bound
    bound = float_of(key_of(nearest) + is_below.to(tl.int32))
    return tl.where(min_p > 0.0, bound, -LARGEST_FLOAT)


@triton.jit
def levels_of(largest, temperature, min_p):
    """The thresholds that a row is first measured at, float32 [LEVELS], highest first."""
    levels = tl.arange(0, LEVELS)
    depths = temperature * tl.exp2(levels.to(tl.float32) * _LEVEL_RATIO)
    thresholds = tl.where(levels == ALL_LEVEL, -LARGEST_FLOAT, largest - depths)
    return tl.maximum(thresholds, min_p_bound(largest, temperature, min_p))


@triton.jit
def choose_level(counts, masses, top_k, top_p):
    """The first level that surely holds all tokens that can still be drawn.

    counts and masses [LEVELS] are of the tokens that reach each level.
    """
    levels = tl.arange(0, LEVELS)
    wanted = rounded_up(top_p.to(tl.float64) * picked(masses, levels == ALL_LEVEL).to(tl.float64))
    by_mass = (top_k == 0) & (top_p < 1.0) & (masses >= wanted)
    is_enough = ((top_k > 0) & (counts >= top_k)) | by_mass
    return tl.sum(tl.where(levels < _DEEPEST_LEVEL, 1 - is_enough.to(tl.int32), 0), 0)


@triton.jit
def weigh(logits, thresholds, largest, temperature):
    """One packed weight of each logit [1, n] that reaches each threshold [LEVELS, 1], else 0.

    A weight is 1 for the count and, below it, the mass exp((logit - largest) / temperature);
    int64 [LEVELS, n]. A lane's weights may be summed as they are, over MOST_TILES tiles at most.
    """
    mass = tl.exp((logits - largest) * (1.0 / temperature))
    weight = _ONE_TOKEN + (mass.to(tl.float64) * _MASS_UNITS).to(tl.int64)
    return tl.where(logits >= thresholds, weight, 0)


@triton.jit
def counts_and_masses(weights):
    """Of summed weights [LEVELS, n], over all lanes: int64 [LEVELS] each."""
    return tl.sum(weights >> _COUNT_SHIFT, 1), tl.sum(weights & (_ONE_TOKEN - 1), 1)


@triton.jit
def steps_between(low, high):
    """Keys that part the range evenly, int64 [LEVELS], lowest first."""
    steps = tl.arange(0, LEVELS).to(tl.int64) + 1
    return low + (high - low) * steps // (LEVELS + 1)


@triton.jit
def of_all_segments(counts, masses, parts, is_part):
    """Counts and masses int64 [LEVELS] of a row, given the places of its segments [n]."""
    places = parts[:, None] * LEVELS + tl.arange(0, LEVELS)[None, :]
    all_counts = tl.load(counts + places, mask=is_part[:, None], other=0)
    all_masses = tl.load(masses + places, mask=is_part[:, None], other=0)
    return tl.sum(all_counts.to(tl.int64), 0), tl.sum(all_masses, 0)
