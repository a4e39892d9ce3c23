"""What a sequence's losses come to: whom to avoid, when to try again, when to give up.

A pure state machine: times are the caller's, in seconds on any one clock.
"""

from typing import Final

from gateway.lane import AnyLane
from gateway.prompt_router import Route
from protos.wire.errors import Overloaded, TokenlineError, Unavailable

_FIRST_BACKOFF_SECONDS: Final = 0.05
_LAST_BACKOFF_SECONDS: Final = 1.0
# A request that kills engines must not kill them all: losses without a new token in between, and
# losses in all.
_MAX_FRUITLESS_LOSSES: Final = 5
_MAX_LOSSES: Final = 20
# Bounds the attempts that are not counted as losses.
_MAX_FRUITLESS_ATTEMPTS: Final = 100
# Nothing was at work on the sequence then, so that nothing speaks against it.
_UNREACHABLE: Final = "_unreachable"
_DRAINING: Final = "_draining"


class Recovery:
    """Of one sequence. It is well until its first loss, and again from each new token on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.num_losses = 0
        self.reason = ""
        self._num_fruitless_losses = 0
        self._num_fruitless_attempts = 0
        self._lost_lanes: set[AnyLane] = set()
        self._lost_at: float | None = None
        self._waiting_since = 0.0
        self._backoff = _FIRST_BACKOFF_SECONDS
        self._error: TokenlineError | None = None

    @property
    def is_well(self) -> bool:
        return self._lost_at is None

    @property
    def lost_lanes(self) -> frozenset[AnyLane]:
        """Those to avoid where there are others."""
        return frozenset(self._lost_lanes)

    @property
    def has_waited(self) -> bool:
        return self._backoff > _FIRST_BACKOFF_SECONDS

    @property
    def may_try_at_once(self) -> bool:
        """Whether the last loss is the first since the sequence was well."""
        return self._num_fruitless_attempts == 1

    def note_waiting(self, now: float) -> None:
        """No replica has ever been at work on the sequence, and none is ready."""
        self._lost_at = self._waiting_since = now

    def note_loss(self, now: float, error: TokenlineError, route: Route) -> None:
        """The attempt on `route` has ended in `error`."""
        self.reason = error.code
        self._error = error
        self._num_fruitless_attempts += 1
        is_counted = not isinstance(error, Overloaded) and not error.code.endswith(
            (_UNREACHABLE, _DRAINING)
        )
        self.num_losses += is_counted
        self._num_fruitless_losses += is_counted
        # While a replica was at work on the sequence, or had it in its queue, nobody waited.
        if self._lost_at is None or not error.code.endswith(_UNREACHABLE):
            self._waiting_since = now
        for lane in route:
            is_named = error.code.startswith(lane.role)
            # The second time, it may be a detokenizer that cannot reach engines which are well.
            if is_named or self._num_fruitless_attempts > 1:
                self._lost_lanes.add(lane)
            if is_named:
                lane.doubt()
        if self._lost_at is None:
            self._lost_at = now

    def note_progress(self, now: float) -> float:
        """The sequence has a new token; says how long ago it was lost."""
        assert self._lost_at is not None
        seconds = now - self._lost_at
        self._lost_at = None
        self._num_fruitless_losses = self._num_fruitless_attempts = 0
        self._lost_lanes.clear()
        self._backoff = _FIRST_BACKOFF_SECONDS
        return seconds

    def next_try_at(self, now: float) -> float:
        """The end of the next back-off."""
        backoff, self._backoff = self._backoff, min(2 * self._backoff, _LAST_BACKOFF_SECONDS)
        return min(now + backoff, self._waiting_since + self._seconds)

    def verdict(self, now: float) -> TokenlineError | None:
        """The error that ends the sequence; None while it may be tried again."""
        if self._num_fruitless_losses >= _MAX_FRUITLESS_LOSSES or self.num_losses >= _MAX_LOSSES:
            return Unavailable(
                f"The services at work on this request were lost {self.num_losses} times, and it "
                "was given up. If trying again does not help, change the request.",
                code=self.reason,
            )
        if self._num_fruitless_attempts >= _MAX_FRUITLESS_ATTEMPTS:
            return self._error
        if now - self._waiting_since >= self._seconds:
            return Unavailable(
                "A service that this request needs was lost, and none has become ready within "
                f"{self._seconds:g} seconds; try again in a while.",
                code=self.reason or "not_ready",
            )
        return None
