"""How much may wait for the engines."""

import math
from typing import Final

from gateway.engine_places import EnginePlaces

# Of what the engines hold at once. Who waits behind as many as run waits about as long as one of
# them takes; with half of that, and the reserve, the whole stays within twice the time.
_DEFAULT_SHARE: Final = 0.5
# Beyond the bounds, for those who come when they were told to, and tenants that have nothing yet.
_RESERVE_SHARE: Final = 0.25


class QueueBounds:
    """As set, or as follows from the engines where 0 was set. Sequences, and expected tokens."""

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
    def hard_max_sequences(self) -> int:
        return with_reserve(self.max_sequences)

    @property
    def hard_max_tokens(self) -> int:
        return with_reserve(self.max_tokens)


def with_reserve(bound: int) -> int:
    return bound + math.ceil(_RESERVE_SHARE * bound)
