"""Waiting for a condition with a deadline, for tests."""

import asyncio
import time
from collections.abc import Awaitable, Callable

DEADLINE_SECONDS = 30.0


async def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Returns once `condition` holds; AssertionError after DEADLINE_SECONDS."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come to hold"
        await asyncio.sleep(0.01)


async def until_true(
    condition: Callable[[], Awaitable[bool]], seconds: float = DEADLINE_SECONDS
) -> None:
    """As `until`, for a condition that has to be asked for."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        await asyncio.sleep(0.02)
