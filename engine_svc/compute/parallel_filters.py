"""min_p, top_k and top_p over ranks: a bound per row, found by counts and masses that are summed.

All three keep a beginning of the ranked tokens, so each comes to the least score that it keeps, and
to how many of the tokens that have just this score. A bound is found digit by digit: ranks add up
how much lies under each value of a digit, three times for the 32 bits of a float.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine_svc.compute.parallel_keys import Masses, ordered_bits
from engine_svc.compute.ranks import Ranks

# Shift and width of each digit, the highest first.
_DIGITS: Final = ((21, 11), (10, 11), (0, 10))


class Filters(NamedTuple):
    """What each row asks for; min_p and top_k are off at 0, top_p at 1."""

    min_p: Tensor  # float32 [n]
    top_k: Tensor  # int64 [n]
    top_p: Tensor  # float32 [n]


class _Bound(NamedTuple):
    """Kept are tokens above `least`, and the first `num_least` of those at it; all int64 [n]."""

    least: Tensor  # in the order of `ordered_bits`
    num_least: Tensor
    num_before: Tensor  # of those at it, how many have lower ranks


class _AtBound(NamedTuple):
    """What ranks have there, int64 [n]."""

    mass_above: Tensor
    mass: Tensor
    count: Tensor
    count_before: Tensor  # of the ranks before this one


def _is_needed(asked: Tensor) -> bool:
    """Whether any row asks for a thing; not known on a device, which nobody may wait for."""
    return asked.device.type != "cpu" or bool(asked.any())


def kept_tokens(
    scaled: Tensor, highest: Tensor, filters: Filters, masses: Masses, ranks: Ranks
) -> Tensor | None:
    """Which tokens may come, bool [n, V / ranks]; None for all of them.

    scaled float32 [n, V / ranks]: logits over temperatures; highest [n] of all ranks. A row with a
    NaN gets an arbitrary answer.
    """
    may_have_top_k, may_have_top_p = _is_needed(filters.top_k > 0), _is_needed(filters.top_p < 1)
    if not (may_have_top_k or may_have_top_p or _is_needed(filters.min_p > 0)):
        return None
    # The least scaled logit whose probability is min_p times the largest: max + log(min_p).
    inside = scaled >= (highest + filters.min_p.log())[:, None]
    if not (may_have_top_k or may_have_top_p):
        return inside
    scores = ordered_bits(scaled)
    mass = masses.of(scaled, highest).masked_fill_(~inside, 0)
    search = _Search(scores, inside, mass, ranks)
    bound = search.top_k(filters.top_k)
    if may_have_top_p:
        total = search.mass_of(bound)
        narrower = search.top_p(filters.top_p, total)
        bound = _Bound(
            *(torch.where(filters.top_p < 1, *pair) for pair in zip(narrower, bound, strict=True))
        )
    is_least = inside & (scores == bound.least[:, None])
    place = is_least.cumsum(dim=-1) + bound.num_before[:, None]
    is_above = inside & (scores > bound.least[:, None])
    return is_above | (is_least & (place <= bound.num_least[:, None]))


class _Search:
    """scores int64, inside bool, mass int64: all [n, V / ranks]; `inside` are those of min_p."""

    def __init__(self, scores: Tensor, inside: Tensor, mass: Tensor, ranks: Ranks) -> None:
        self._scores = scores
        self._inside = inside
        self._mass = mass
        self._ranks = ranks

    def top_k(self, top_k: Tensor) -> _Bound:
        """The bound of min_p and top_k."""
        counts = self._inside.long()
        num_inside = self._ranks.sum_over_ranks(counts.sum(dim=-1))
        wanted = torch.where(top_k > 0, torch.minimum(top_k, num_inside), num_inside)
        least, num_above = self._find(counts, wanted)
        return _Bound(least, wanted - num_above, self._at(least).count_before)

    def mass_of(self, bound: _Bound) -> Tensor:
        """What all that it keeps comes to, over all ranks."""
        at = self._at(bound.least)
        return at.mass_above + bound.num_least * (at.mass // at.count.clamp(min=1))

    def top_p(self, top_p: Tensor, total: Tensor) -> _Bound:
        """The bound of the likeliest that come to top_p of `total`, if that is less than 1."""
        # Kept is what has less than this before it.
        wanted = (top_p.double() * total.double()).ceil().long().clamp_(min=1)
        least, mass_above = self._find(self._mass, wanted)
        at = self._at(least)
        # Those that have one score have one mass; more than 0, where it was needed.
        each = (at.mass // at.count.clamp(min=1)).clamp_(min=1)
        return _Bound(least, (wanted - mass_above + each - 1) // each, at.count_before)

    def _find(self, measure: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The largest score at and above which all ranks have `wanted` of a measure, and what
        they have above it; measure int64 [n, V / ranks], at least 0."""
        found, missing = torch.zeros_like(wanted), wanted.clone()
        for shift, width in _DIGITS:
            last = (1 << width) - 1
            is_candidate = (self._scores >> (shift + width)) == found[:, None]
            # So that places are counted from the largest digit on.
            digits = last - ((self._scores >> shift) & last)
            sums = measure.new_zeros(len(wanted), last + 1)
            sums.scatter_add_(1, digits, measure * is_candidate)
            self._ranks.sum_over_ranks(sums)
            so_far = sums.cumsum(dim=-1)
            place = (so_far < missing[:, None]).sum(dim=-1, keepdim=True).clamp_(max=last)
            missing -= (so_far - sums).gather(1, place)[:, 0]
            found = (found << width) | (last - place[:, 0])
        return found, wanted - missing

    def _at(self, least: Tensor) -> _AtBound:
        is_least = self._inside & (self._scores == least[:, None])
        is_above = self._inside & (self._scores > least[:, None])
        own = (
            (self._mass * is_above).sum(dim=-1),
            (self._mass * is_least).sum(dim=-1),
            is_least.sum(dim=-1),
        )
        of_ranks = self._ranks.gather(torch.stack(own))
        before = of_ranks[: self._ranks.rank, 2].sum(dim=0)
        return _AtBound(*of_ranks.sum(dim=0), before)
