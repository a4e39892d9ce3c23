"""One request in the waiting room: what it is, and how it is told that it may start, or may not."""

import asyncio
import math
from dataclasses import dataclass

from gateway.job import Job, retry_keys
from protos.wire.errors import RequestCancelled, RequestTimeout, Unavailable


@dataclass(slots=True, eq=False)
class Visit:
    """One request, from when it came in. `deadline` is of the event loop's clock.

    `is_promised`: it comes when it was told to. `goes_on`: it was let in before, at a gateway that
    is gone, and waits for nobody. `num_tokens` is what its tenant was charged.
    """

    job: Job
    deadline: float
    is_promised: bool = False
    goes_on: bool = False
    has_arrived: bool = False
    num_tokens: int = 0
    _keys: tuple[bytes, ...] = ()

    @property
    def tenant(self) -> str:
        return self.job.tenant

    @property
    def num_sequences(self) -> int:
        return self.job.num_sequences

    @property
    def keys(self) -> tuple[bytes, ...]:
        """What it is known by when it comes again."""
        if not self._keys:
            self._keys = retry_keys(self.job)
        return self._keys


@dataclass(slots=True, eq=False)
class Place:
    """What a waiting request is told through: that it may start, or what is wrong."""

    visit: Visit
    granted: asyncio.Future[None]

    @property
    def is_granted(self) -> bool:
        granted = self.granted
        return granted.done() and not granted.cancelled() and granted.exception() is None

    def fail(self, error: Exception) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)


def cancelled() -> RequestCancelled:
    return RequestCancelled("The request was cancelled.", code="request_cancelled")


def timed_out() -> RequestTimeout:
    return RequestTimeout(
        "The request's `timeout` was over before an engine had a place for it.",
        code="timeout",
        param="timeout",
    )


def no_engine() -> Unavailable:
    return Unavailable("No engine has come back; try again.", code="not_ready")


def too_late(seconds: float) -> RequestTimeout:
    """For a request whose turn is `seconds` away."""
    return RequestTimeout(
        f"The request would wait about {math.ceil(seconds)} s for its turn, which is longer than "
        "its `timeout` leaves; allow more time, or try again later.",
        code="timeout",
        param="timeout",
    )
