"""Tells when a client is too slow: to send the request that it began, or to take its answer."""

import asyncio
from collections.abc import Callable

from gateway.connection_limits import ConnectionLimits


class ReceiveWatch:
    """Watches one request on its way in; calls `too_slow(why)` at most once for each.

    Timers run only for requests that do not come in one piece. While reading is paused, which is
    not the client's doing, its time stands still.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        is_paused: Callable[[], bool],
        too_slow: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._is_paused = is_paused
        self._too_slow = too_slow
        self._timer: asyncio.TimerHandle | None = None
        self._body_seconds = 0.0
        self._num_seen = 0
        # Bytes of the body so far.
        self.num_body_bytes = 0

    def head_is_pending(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._limits.head_seconds, self._head_is_late)

    def body_is_pending(self) -> None:
        if self._timer is None:
            self._body_seconds = 0.0
            self._num_seen = self.num_body_bytes
            self._watch_body()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._is_paused():
            self.head_is_pending()
        else:
            self._too_slow(f"within {self._limits.head_seconds:g} seconds")

    def _watch_body(self) -> None:
        interval = self._limits.body_silence_seconds
        self._timer = self._loop.call_later(interval, self._check_body)

    def _check_body(self) -> None:
        self._timer = None
        limits, num_bytes = self._limits, self.num_body_bytes
        if self._is_paused():
            self._watch_body()
            return
        self._body_seconds += limits.body_silence_seconds
        seconds = limits.body_seconds + num_bytes / limits.body_bytes_per_second
        if num_bytes == self._num_seen:
            self._too_slow(f"for {limits.body_silence_seconds:g} seconds nothing of it came")
        elif self._body_seconds >= seconds:
            self._too_slow(f"{num_bytes} bytes came in {self._body_seconds:g} seconds")
        else:
            self._num_seen = num_bytes
            self._watch_body()


class SendWatch:
    """Watches what is there for a client; calls `stalled` when it takes nothing for too long."""

    # In a time-out: what it may be exceeded by is one check.
    _NUM_CHECKS = 4

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_seconds: float,
        num_unsent: Callable[[], int],
        stalled: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._timeout_seconds = timeout_seconds
        self._num_unsent = num_unsent
        self._stalled = stalled
        self._timer: asyncio.TimerHandle | None = None
        self._num_last = 0
        self._since = 0.0

    def start(self) -> None:
        """Watches from now on, until all is sent or `stop`. Nothing may be added meanwhile."""
        num_unsent = self._num_unsent()
        if self._timer is None and num_unsent:
            self._num_last = num_unsent
            self._since = self._loop.time()
            self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._timeout_seconds / self._NUM_CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        num_unsent = self._num_unsent()
        if num_unsent == 0:
            return
        now = self._loop.time()
        if num_unsent < self._num_last:
            self._num_last, self._since = num_unsent, now
        if now - self._since >= self._timeout_seconds:
            self._stalled()
        else:
            self._wait()
