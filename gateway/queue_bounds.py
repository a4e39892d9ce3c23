"""How much may wait for the engines."""

import math
from typing import Final

from gateway.engine_places import EnginePlaces

# Of what the engines hold at once. Who waits behind as many as run waits about as long as one of
# them takes; with a little less, and what engines have beyond what they run, the whole stays within
# twice the time.
_DEFAULT_SHARE: Final = 0.625
# While refused clients have been told when to come again, newcomers may not take the rest: engines
# end many sequences at once, then none for long, and who was told comes in between.
_NEWCOMERS_SHARE: Final = 0.5
_RESERVE_SHARE: Final = 0.25


class QueueBounds:
    """As set, or as follows from the engines where 0 was set. Sequences, and expected tokens.

    The `newcomer` ones hold while there are promises that others are to come back for.
    """

    def __init__(self, places: EnginePlaces, max_sequences: int, max_tokens: int) -> None:
        self._places = places
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens

    @property
    def max_sequences(self) -> int:
        return self._max_sequences or math.ceil(_DEFAULT_SHARE * self._places.capacity)

    @property
    def max_tokens(self) -> int:
        return self._max_tokens or math.ceil(_DEFAULT_SHARE * self._places.num_kv_tokens)

    @property
    def newcomer_sequences(self) -> int:
        return max(1, int(_NEWCOMERS_SHARE * self.max_sequences))

    @property
    def newcomer_tokens(self) -> int:
        return max(1, int(_NEWCOMERS_SHARE * self.max_tokens))

    @property
    def promised_sequences(self) -> int:
        """At least one more than newcomers have."""
        return max(self.max_sequences, self.newcomer_sequences + 1)


def with_reserve(bound: int) -> int:
    """A bound for those who come when they were told to."""
    return bound + math.ceil(_RESERVE_SHARE * bound)
