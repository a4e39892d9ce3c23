"""How long steps take by their number of tokens, learned from those that were computed."""

import math
from bisect import bisect_left
from typing import Final

# Numbers of tokens that are near each other share an estimate; these are the most of each: all up
# to 4, and then four to each doubling.
_MOST_TOKENS: Final = (1, 2, 3, *(n << shift for shift in range(13) for n in (4, 5, 6, 7)))
# How fast the estimates follow what is seen.
_SLOWEST_RATE: Final = 0.05
_PACE_RATE: Final = 0.2
# A step that was held up by something else says little.
_MOST_SURPRISE: Final = 2.0


class StepTimes:
    """Estimates of seconds per step, for steps whose every token is sampled after.

    An estimate is the product of a pace, which follows the machine's load and the sequences'
    growth, and of a cost per number of tokens, which is the machine's own. So estimates for steps
    that have not been seen for long stay comparable with the others.
    """

    def __init__(self) -> None:
        self._pace = 1.0
        # Of what has been seen, by number of tokens, rising. Tokens are means of those seen.
        self._classes: list[int] = []
        self._tokens: list[float] = []
        self._costs: list[float] = []
        self._num_seen: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not self._classes

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step of `num_tokens`."""
        if self.is_empty:
            self._pace = seconds / _guessed_growth(num_tokens)
        guess = self.estimate(num_tokens)
        surprise = min(max(seconds / guess, 1 / _MOST_SURPRISE), _MOST_SURPRISE)
        size_class = bisect_left(_MOST_TOKENS, num_tokens)
        index = bisect_left(self._classes, size_class)
        if index == len(self._classes) or self._classes[index] != size_class:
            self._classes.insert(index, size_class)
            self._tokens.insert(index, float(num_tokens))
            self._costs.insert(index, seconds / self._pace)
            self._num_seen.insert(index, 1)
            return
        self._num_seen[index] += 1
        rate = max(_SLOWEST_RATE, 1 / self._num_seen[index])
        self._tokens[index] += rate * (num_tokens - self._tokens[index])
        # Both move by powers of the same: so while one size is all there is, no noise can move them
        # apart, which would make the other sizes' estimates wrong.
        self._costs[index] *= surprise**rate
        self._pace *= surprise ** (_PACE_RATE * (1 - rate))

    def estimate(self, num_tokens: int) -> float:
        """Seconds that a step of `num_tokens`, at least one, is expected to take."""
        tokens, costs = self._tokens, self._costs
        if not tokens:
            return self._pace * _guessed_growth(num_tokens)
        above = bisect_left(tokens, num_tokens)
        if 0 < above < len(tokens):
            few, many = tokens[above - 1], tokens[above]
            share = (num_tokens - few) / (many - few)
            return self._pace * (costs[above - 1] + share * (costs[above] - costs[above - 1]))
        nearest = min(above, len(tokens) - 1)
        return self._pace * costs[nearest] * _guessed_growth(num_tokens / tokens[nearest])


def _guessed_growth(times_tokens: float) -> float:
    """Of the time of a step of which nothing alike has been seen. A memory-bound machine does
    better, a compute-bound one worse: one such step tells."""
    return math.sqrt(times_tokens)
