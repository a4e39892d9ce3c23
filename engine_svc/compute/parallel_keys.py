"""Numbers that ranks can compare and add exactly: a token's place in the ranking, a row's mass."""

import math
from typing import Final

import torch
from torch import Tensor

_LOW_BITS: Final = 32
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
_SIGN: Final = 1 << 31


def ordered_bits(values: Tensor) -> Tensor:
    """float32 -> int64 in [0, 2^32) that order as the values do; NaN above all, -0 as 0.

    A float's bits order as a signed integer does once those of a negative number are turned round.
    """
    bits = (values + 0.0).masked_fill_(values.isnan(), torch.nan).view(torch.int32)
    return (bits ^ ((bits >> 31) & (_SIGN - 1))).long() + _SIGN


def ranking_keys(values: Tensor, token_ids: Tensor) -> Tensor:
    """int64 keys that order as (value, -token id) does; token ids below 2^32."""
    return ((ordered_bits(values) - _SIGN) << _LOW_BITS) | (_LOW_MASK - token_ids.long())


def ids_of(keys: Tensor) -> Tensor:
    return _LOW_MASK - (keys & _LOW_MASK)


def values_of(keys: Tensor) -> Tensor:
    """The float32 values, bit for bit."""
    ordered = (keys >> _LOW_BITS).int()
    return (ordered ^ ((ordered >> 31) & (_SIGN - 1))).view(torch.float32)


class Masses:
    """Probabilities relative to the likeliest token's, as integers: their sums are exact, so the
    same in any order and for any number of ranks.

    The masses of a whole vocabulary add up to less than 2^63.
    """

    def __init__(self, vocab_size: int) -> None:
        self._shift = 62 - vocab_size.bit_length()

    def of(self, scores: Tensor, highest: Tensor) -> Tensor:
        """exp(score - highest) · 2^shift, int64 [n, …] of scores [n, …] and the highest [n]."""
        return ((scores - highest[:, None]).exp_() * 2.0**self._shift).long()

    def log(self, masses: Tensor) -> Tensor:
        """float64 logs of sums of exp(score - highest)."""
        return masses.double().log() - self._shift * math.log(2.0)
