"""Waiting for a condition with a deadline, for tests."""

import asyncio
import time
from collections.abc import Callable

DEADLINE_SECONDS = 30.0


async def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Returns once `condition` holds; AssertionError after DEADLINE_SECONDS."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come to hold"
        await asyncio.sleep(0.01)
