"""A block of code that something outside can end with an error: a disconnect, a cancel."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from starlette.types import Receive

from gateway.errors import ClientDisconnected


class Interruptible:
    """`async with Interruptible() as block:` ends early, raising `error`, on `interrupt(error)`.

    Built like asyncio.timeout: the task is cancelled, and the cancellation is turned into the
    error where the block ends, unless somebody else cancelled the task too.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._error: Exception | None = None

    def interrupt(self, error: Exception) -> None:
        """Ends the block. Later calls, and calls after the block, do nothing."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if (
            self._error is not None
            and task.uncancel() <= self._cancelling
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise self._error from error


@asynccontextmanager
async def ended_by_disconnect(receive: Receive) -> AsyncIterator[None]:
    """The block ends with ClientDisconnected when the client goes. The body must be read already.

    `receive` blocks until then, so this costs nothing while the client stays.
    """
    async with Interruptible() as block:
        watcher = asyncio.create_task(_interrupt_on_disconnect(receive, block))
        try:
            yield
        finally:
            watcher.cancel()


async def _interrupt_on_disconnect(receive: Receive, block: Interruptible) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    block.interrupt(ClientDisconnected())
