"""Gumbel-max over tiles of logits: exact noise for those tokens alone that may win.

The winner is argmax(logit / temperature + noise), in float64, the first of equal ones (Maddison et
al., "A* sampling", 2014): which it is depends neither on the order of the tiles nor on how a row is
split into them.
"""

import triton
import triton.language as tl

from kernels.gpu.philox import bits_of, gumbel, noise_bound
from kernels.ops import GREEDY_TEMPERATURE

# Kinds of rows.
GREEDY = tl.constexpr(0)
PLAIN = tl.constexpr(1)
FILTERED = tl.constexpr(2)

NO_TOKEN = tl.constexpr(2**31 - 1)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)


@triton.jit
def kind_of(temperature, min_p, top_k, top_p):
    """What a row asks for: its likeliest token, a draw from all, or one from what filters leave."""
    is_random = (temperature >= _GREEDY_TEMPERATURE) & (top_p > 0.0)
    is_filtered = (min_p > 0.0) | (top_k > 0) | (top_p < 1.0)
    return tl.where(is_random, tl.where(is_filtered, FILTERED, PLAIN), GREEDY)


@triton.jit
def is_number(x):
    """Neither NaN nor infinite."""
    return tl.abs(x) <= LARGEST_FLOAT


@triton.jit
def smallest_at(values, wanted, token_ids):
    """The least of the ids whose value is `wanted`."""
    return tl.min(tl.where(values == wanted, token_ids, NO_TOKEN), 0)


@triton.jit
def no_winner():
    """The score, the id and the bar before any token was looked at."""
    score = tl.full((), float("-inf"), tl.float64)
    return score, tl.full((), NO_TOKEN, tl.int32), tl.full((), float("-inf"), tl.float32)


@triton.jit
def best_of(logits, token_ids, bits, is_kept, temperature, seed, position, score, winner, bar):
    """The best token so far, of a tile more: (its score, its id, the bar).

    A token whose bound is no higher than the bar cannot win. Bounds are taken in float32: they may
    be off by 1e-6 of the score and the noise. What is too large for it is found out in float64.
    """
    bounds = tl.maximum(logits * (1.0 / temperature) + noise_bound(bits), -LARGEST_FLOAT)
    bounds = tl.where(is_kept & is_number(logits), bounds, float("-inf"))
    while tl.max(bounds, 0) > bar:
        lane = tl.argmax(bounds, 0)
        is_it = tl.arange(0, bounds.shape[0]) == lane
        token_id = tl.sum(tl.where(is_it, token_ids, 0), 0)
        logit = tl.sum(tl.where(is_it, logits, 0.0), 0)
        scaled = logit.to(tl.float64) / temperature.to(tl.float64)
        # Anew, since of all bits none need then be kept.
        mine = scaled + gumbel(bits_of(token_id, seed, position)).to(tl.float64)
        is_better = (mine > score) | ((mine == score) & (token_id < winner))
        score = tl.where(is_better, mine, score)
        winner = tl.where(is_better, token_id, winner)
        slack = 1e-4 + 1e-6 * (tl.abs(score) + 25.0)
        least = score - slack
        clipped = tl.minimum(tl.maximum(least, -LARGEST_FLOAT), LARGEST_FLOAT).to(tl.float32)
        bar = tl.where(least < -LARGEST_FLOAT, float("-inf"), clipped)
        bounds = tl.where(is_it, float("-inf"), bounds)
    return score, winner, bar
