"""The calls that a stub service serves at this moment, which a test can cut."""

import asyncio
from collections.abc import Coroutine


class OpenCalls:
    """Serves each call in a task of its own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, call: Coroutine[None, None, None]) -> None:
        """Returns when the call ends, be it by `cut`, and leaves nothing of it behind."""
        serving = asyncio.create_task(call)
        self._tasks.add(serving)
        try:
            await asyncio.wait({serving})
        finally:
            self._tasks.discard(serving)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    def cut(self) -> None:
        """Ends every open call, as a crash would; new ones are taken."""
        for task in self._tasks:
            task.cancel()
