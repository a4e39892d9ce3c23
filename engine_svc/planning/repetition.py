"""What a request seems to be repeating of its own tokens, and how surely it goes on to."""

from collections.abc import Sequence
from typing import Final

from engine_svc.planning.ngram_index import NgramIndex

# How fast an estimate follows what is seen, for one request and for all.
_OWN_RATE: Final = 0.25
_SHARED_RATE: Final = 0.03
# No estimate reaches 1, at which a draft would never end.
_MOST_CERTAIN: Final = 0.98
# What drafts, its own and others', may cost a request: in the long run no more of its speed than
# this leaves; at once no more steps than they have saved it so far, up to a bound.
_LEAST_SPEED: Final = 0.97
_MOST_CREDIT: Final = 20.0
# After so many tokens that went unseen, it is quicker to look for a repetition anew.
_MAX_UNSEEN: Final = 64


class Certainty:
    """How likely the next token repeats what came before, by how many tokens have done so already.

    Two tokens that have been seen together before say little about the next, sixteen say a lot.
    """

    __slots__ = ("_by_class",)

    def __init__(self, other: "Certainty | None" = None) -> None:
        """As sure as another, which stays what it is."""
        self._by_class: list[float] = [0.3, 0.5, 0.7, 0.8] if other is None else other._by_class[:]

    def of(self, num_matched: int) -> float:
        return self._by_class[_class_of(num_matched)]

    def learn(self, num_matched: int, agrees: bool, rate: float) -> None:
        by_class, index = self._by_class, _class_of(num_matched)
        by_class[index] += rate * (agrees * _MOST_CERTAIN - by_class[index])


def _class_of(num_matched: int) -> int:
    """0 for two and three, 1 for four to seven, 2 to fifteen, 3 for more."""
    return min(num_matched.bit_length() - 2, 3)


class Repetition:
    """Follows one request. `shared` is what all requests have taught, where this one begins.

    What is expected is compared with what comes, whether or not it was drafted: so it is known at
    no cost when drafts begin to pay, and when no longer.
    """

    __slots__ = (
        "_certainty",
        "_credit",
        "_index",
        "_last_step",
        "_num_matched",
        "_num_seen",
        "_shared",
        "_source",
    )

    def __init__(self, shared: Certainty) -> None:
        self._shared = shared
        self._certainty = Certainty(shared)
        self._index = NgramIndex()
        # The next token is expected to be that at `_source`, since `_num_matched` tokens before it
        # and before the end agree. Nothing is expected while that is 0.
        self._source = 0
        self._num_matched = 0
        self._num_seen = 0
        # In steps.
        self._credit = 0.0
        self._last_step = -2

    def patience(self, num_accepted: float) -> float:
        """How many times as long as without drafts the next step may take for this request, with so
        many of its own drafts accepted."""
        return self._credit + (1 + num_accepted) / _LEAST_SPEED

    def account(self, token_ids: Sequence[int], step: int, slowness: float) -> None:
        """Before `follow`: steps are counted, and the one before `step` took `slowness` times as
        long as without drafts."""
        if self._last_step == step - 1:
            num_new = len(token_ids) - self._num_seen
            credit = self._credit + num_new / _LEAST_SPEED - slowness
            self._credit = min(credit, _MOST_CREDIT)
        self._last_step = step

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Takes in all tokens of the request; whether what follows them can be guessed.

        `token_ids` is always the same sequence, possibly longer than at the last call.
        """
        if len(token_ids) - self._num_seen > _MAX_UNSEEN:
            self._num_matched = 0
        if self._num_matched:
            self._compare(token_ids)
        self._num_seen = len(token_ids)
        if not self._num_matched:
            self._source, self._num_matched = self._index.find(token_ids)
        return self._num_matched > 0

    def _compare(self, token_ids: Sequence[int]) -> None:
        for position in range(self._num_seen, len(token_ids)):
            agrees = token_ids[position] == token_ids[self._source]
            self._certainty.learn(self._num_matched, agrees, _OWN_RATE)
            self._shared.learn(self._num_matched, agrees, _SHARED_RATE)
            if not agrees:
                self._num_matched = 0
                return
            self._source += 1
            self._num_matched += 1

    def chances(self, count: int, least: float) -> list[float]:
        """For each of the next `count` tokens, how likely it and all before it come as expected.

        They fall strictly, and end where they are under `least`.
        """
        chances = []
        chance = 1.0
        for num_matched in range(self._num_matched, self._num_matched + count):
            chance *= self._certainty.of(num_matched)
            if chance < least:
                break
            chances.append(chance)
        return chances

    def expected(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that are expected after all that `follow` has seen."""
        period = len(token_ids) - self._source
        if count <= period:
            return list(token_ids[self._source : self._source + count])
        # A sequence that repeats its very last tokens is expected to go on doing so.
        return [token_ids[self._source + offset % period] for offset in range(count)]
