"""The virtual queue of those who were refused: each is told a time of its own to come back."""

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Nobody is told to wait longer. Clients such as OpenAI's do not wait even so long.
MAX_SECONDS: Final = 300
MAX_PROMISES: Final = 1 << 15
# A client is as late as its network and its clock make it.
_GRACE_SECONDS: Final = 2.0
_GRACE_SHARE: Final = 0.1
# Headers are rounded to milliseconds, and clocks tick.
_EARLY_SECONDS: Final = 0.05
# Of what drains, for those who come back; the rest is for newcomers. With half, one in 14 of those
# who came in time found the queue full of others who did.
_RESERVED_SHARE: Final = 0.4
# As airlines do: more are promised a second than it holds, since not all come. Never more than
# 8 times as many: they may all come after all.
_MIN_KEPT_SHARE: Final = 0.125
_FIRST_KEPT_SHARE: Final = 0.5
_KEPT_WEIGHT: Final = 0.02


@dataclass(slots=True, eq=False)
class _Promise:
    """Told to a client known by any of `keys`."""

    keys: tuple[bytes, ...]
    due_at: float
    is_over: bool = False


class Promises:
    """Who was told to come back when. Seconds fill up in turn, so that not all come at once.

    `clock` is monotonic, in seconds. A promise that is not taken up in time lapses.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Of each key the one that is due first comes first.
        self._by_key: dict[bytes, list[_Promise]] = {}
        # By whole seconds of the clock: who lapses then, and how many sequences may come then.
        self._lapsing: dict[int, list[_Promise]] = {}
        self._num_promised: dict[int, int] = {}
        self._next_second = math.floor(clock())
        self._kept_share = _FIRST_KEPT_SHARE
        self.num_open = 0
        self.num_kept = 0
        self.num_lapsed = 0

    def take(self, *keys: bytes) -> bool:
        """Whether a client known by one of `keys` was told to come now; it is then as good as in.

        Later clients with the same keys need promises of their own.
        """
        self._lapse()
        now = self._clock()
        for key in keys:
            promises = self._by_key.get(key)
            if promises and promises[0].due_at - _EARLY_SECONDS <= now:
                self._end(promises[0])
                self.num_kept += 1
                self._learn(1.0)
                return True
        return False

    def make(
        self, keys: tuple[bytes, ...], num_sequences: int, drain: float, not_before: float = 0.0
    ) -> int:
        """In how many whole seconds a client is to come back, while `drain` sequences end a second.

        not_before: seconds until the first of those that run is expected to end.
        The first key is the client's own: the same again is told the same time again.
        """
        self._lapse()
        now = self._clock()
        own = self._by_key.get(keys[0])
        if own:
            return max(1, math.ceil(own[0].due_at - now))
        if self.num_open >= MAX_PROMISES:
            return MAX_SECONDS
        second = self._reserve(math.floor(now + not_before), num_sequences, drain)
        seconds = second - math.floor(now) if second is not None else MAX_SECONDS
        if second is None or seconds > MAX_SECONDS:
            return MAX_SECONDS
        due_at = now + seconds
        grace = _GRACE_SECONDS + _GRACE_SHARE * seconds
        promise = _Promise(keys, due_at)
        for key in keys:
            insort(self._by_key.setdefault(key, []), promise, key=lambda made: made.due_at)
        self._lapsing.setdefault(math.ceil(due_at + grace), []).append(promise)
        self.num_open += 1
        return seconds

    def _reserve(self, start: int, num_sequences: int, drain: float) -> int | None:
        """Fills up the seconds after `start`; the one that the last sequence is in.

        None if they do not suffice.
        """
        room = drain * _RESERVED_SHARE / max(_MIN_KEPT_SHARE, self._kept_share)
        reserved: list[tuple[int, int]] = []
        for second in range(start + 1, start + 1 + MAX_SECONDS):
            # Whole sequences, also where a second has room for less than one.
            capacity = math.floor(room * (second + 1)) - math.floor(room * second)
            num_free = min(num_sequences, capacity - self._num_promised.get(second, 0))
            if num_free > 0:
                reserved.append((second, num_free))
                num_sequences -= num_free
            if num_sequences <= 0:
                for taken, count in reserved:
                    self._num_promised[taken] = self._num_promised.get(taken, 0) + count
                return second
        return None

    def _lapse(self) -> None:
        """Ends the promises that nobody has taken up."""
        now = math.floor(self._clock())
        for second in range(self._next_second, now + 1):
            self._num_promised.pop(second - 1, None)
            for promise in self._lapsing.pop(second, ()):
                if not promise.is_over:
                    self._end(promise)
                    self.num_lapsed += 1
                    self._learn(0.0)
        self._next_second = now + 1

    def _learn(self, kept: float) -> None:
        self._kept_share += _KEPT_WEIGHT * (kept - self._kept_share)

    def _end(self, promise: _Promise) -> None:
        promise.is_over = True
        self.num_open -= 1
        for key in promise.keys:
            promises = self._by_key[key]
            promises.remove(promise)
            if not promises:
                del self._by_key[key]
