"""The outputs of one sequence as an async iterator, merged where its reader falls behind."""

import asyncio
from collections.abc import Callable
from typing import Generic, Self

from protos.wire.stream_adapter import OutputT


class OutputStream(Generic[OutputT]):
    """Outputs of one sequence as an async iterator. A slow reader gets merged outputs."""

    def __init__(self, merge: Callable[[OutputT, OutputT], None]) -> None:
        self._merge: Callable[[OutputT, OutputT], None] = merge
        self._pending: OutputT | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def put(self, output: OutputT) -> None:
        if self._pending is None:
            self._pending = output
        else:
            self._merge(self._pending, output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputT:
        if self._ended:
            raise StopAsyncIteration
        while self._pending is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._pending = self._pending, None
        self._ended = output.HasField("finish")
        return output
