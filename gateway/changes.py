"""Tells those who wait for a replica when the replicas have changed."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Changes:
    """For one event loop. Whoever waits also sets a time of its own: a change may never come."""

    def __init__(self) -> None:
        self._waiters: set[Callable[[], None]] = set()

    def call_once(self, waiter: Callable[[], None]) -> None:
        """Calls `waiter` at the next change, unless it is forgotten before."""
        self._waiters.add(waiter)

    def forget(self, waiter: Callable[[], None]) -> None:
        self._waiters.discard(waiter)

    def ring(self) -> None:
        """Something has changed: calls every waiter from the event loop."""
        loop = asyncio.get_running_loop()
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            loop.call_soon(waiter)

    async def wait(self, seconds: float) -> None:
        """Returns at the next change, or after `seconds`."""
        changed = asyncio.Event()
        self.call_once(changed.set)
        try:
            # Not wait_for: Python 3.11's loses a cancel that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await changed.wait()
        finally:
            self.forget(changed.set)
