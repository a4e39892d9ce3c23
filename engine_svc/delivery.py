"""Takes what steps brought from the engine's thread to the event loop, and wakes it seldom."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from engine_svc.planning.request import Request, RequestOutput

# What the engine's thread may hand over before the loop takes it in; then the thread waits.
# Otherwise steps quicker than their delivery would keep the loop from reading even an abort.
_MAX_HELD: Final = 16
# So many are delivered without waiting for the interval to end, lest the thread has to wait.
_MANY_HELD: Final = _MAX_HELD // 2
# Of a request: a reader waits for the first words, and a short answer has no others.
_TOKENS_AT_ONCE: Final = 8


class Delivery:
    """Hands the outputs of steps to `deliver`, which is called on the event loop, in order.

    A token costs each service that it passes through a wake-up, more than it costs to carry: beside
    steps of one row, which leave nothing of a service in the caches, all of them together took half
    as long as the step. So what comes within `interval_seconds` of a delivery is held until the
    interval is over, and then delivered together. The first tokens of a request and its end are not
    held, nor is anything where steps take longer than that. 0 delivers each step at once.
    """

    def __init__(
        self, deliver: Callable[[list[RequestOutput]], None], interval_seconds: float
    ) -> None:
        self._deliver = deliver
        self._interval_seconds = interval_seconds
        self._event_loop = asyncio.get_running_loop()
        self._held: deque[Sequence[RequestOutput]] = deque()
        self._room = threading.Semaphore(_MAX_HELD)
        # Whether the loop is about to take in what is held: woken for it, or by the end of the
        # interval. Each side sets its half before it looks at the other's: nothing is left lying.
        self._is_woken = False
        self._is_interval = False
        # How many more tokens of a request are not held. The engine thread's own.
        self._starting: dict[Request, int] = {}

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        """Hands over what a step brought. On the engine's thread, which waits for room."""
        self._room.acquire()
        self._held.append(outputs)
        # All outputs are looked at, for those who start.
        urgent = any([self._is_urgent(output) for output in outputs])
        if urgent or not self._is_interval or len(self._held) >= _MANY_HELD:
            self._wake()

    def flush(self) -> None:
        """Delivers all that was handed over. On the event loop."""
        outputs: list[RequestOutput] = []
        while self._held:
            outputs += self._held.popleft()
            self._room.release()
        if not outputs:
            return
        if self._interval_seconds and not self._is_interval:
            self._is_interval = True
            self._event_loop.call_later(self._interval_seconds, self._end_interval)
        self._deliver(outputs)

    def _is_urgent(self, output: RequestOutput) -> bool:
        request = output.request
        if output.prefill_started:
            self._starting[request] = _TOKENS_AT_ONCE
            return True
        num_left = self._starting.get(request, 0)
        if output.finish is not None or 0 < num_left <= len(output.token_ids):
            self._starting.pop(request, None)
            return True
        if num_left:
            self._starting[request] = num_left - len(output.token_ids)
        return num_left > 0

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._event_loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_woken = False
        self.flush()

    def _end_interval(self) -> None:
        self._is_interval = False
        self.flush()
