"""The lanes to all replicas of one service, opened and closed as replicas come and go."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from gateway.lane import AnyLane
from protos.wire.discovery import AddressSet

logger = logging.getLogger(__name__)

LaneT = TypeVar("LaneT", bound=AnyLane)


class LaneSet(Generic[LaneT]):
    """An async context manager; `on_change` is called after each poll of a lane.

    A lane whose address is gone takes no new sequences, and is closed when its last one ends.
    """

    def __init__(
        self,
        role: str,
        targets: Sequence[str],
        open_lane: Callable[[str], LaneT],
        on_change: Callable[[], None],
    ) -> None:
        self.role = role
        self.targets = tuple(targets)
        self.lanes: dict[str, LaneT] = {}
        self._addresses = AddressSet(targets)
        self._open_lane = open_lane
        self._on_change = on_change
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._addresses)
        self._open_new()
        self._start(self._follow_addresses())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def _start(self, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow_addresses(self) -> None:
        while True:
            await self._addresses.changed.wait()
            self._addresses.changed.clear()
            self._open_new()
            for address in self.lanes.keys() - self._addresses.addresses:
                logger.info("%s is gone", self.lanes.pop(address).name)
                self._on_change()

    def _open_new(self) -> None:
        for address in sorted(self._addresses.addresses - self.lanes.keys()):
            lane = self._open_lane(address)
            self.lanes[address] = lane
            self._start(self._keep(lane))

    async def _keep(self, lane: LaneT) -> None:
        async with lane:
            while self.lanes.get(lane.address) is lane or lane.num_live:
                before = lane.problem
                await lane.poll()
                if lane.problem != before:
                    logger.info("%s %s", lane.name, lane.problem or "is serving")
                self._on_change()
                await lane.pause()
