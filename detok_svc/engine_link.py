"""The connections to engines: one multiplexed stream to each, made on first use."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.errors import InvalidRequest
from protos.wire.multiplex_client import StreamClient
from protos.wire.settings import parse_addresses
from protos.wire.stream_adapter import engine_adapter

logger = logging.getLogger(__name__)

ENGINE_LOST: Final = "engine_lost"

Sink = Callable[[engine_pb2.Output], None]
LoadListener = Callable[[detok_pb2.EngineLoadReport], None]


class EngineLink:
    """The stream to one engine. It is made again by itself when it breaks, until `close`."""

    def __init__(self, address: str, on_load: LoadListener) -> None:
        self._address = address
        self._on_load = on_load
        self._channel = open_channel(address)
        self._client: StreamClient[engine_pb2.Submit, engine_pb2.Output] = StreamClient(
            engine_pb2_grpc.EngineServiceStub(self._channel).Generate,
            engine_adapter(),
            lost_code=ENGINE_LOST,
            on_response=self._report_load,
        )
        self._closing = asyncio.Event()
        self._last_use = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._keep_open())

    def submit(self, submit: engine_pb2.Submit, sink: Sink) -> Callable[[], None]:
        """Begins a sequence, whose outputs go to `sink`; returns the function that aborts it."""
        sequence_id = self._client.submit(submit, sink)
        return lambda: self._client.abort(sequence_id)

    def seconds_idle(self, now: float) -> float:
        """How long ago, at `now`, this was last seen with a live sequence."""
        if self._client.num_live:
            self._last_use = now
        return now - self._last_use

    async def close(self) -> None:
        """Ends the stream; sequences that are still live get a finish with `engine_lost`."""
        self._closing.set()
        await self._task

    async def _keep_open(self) -> None:
        async with self._channel, self._client:
            await self._closing.wait()

    def _report_load(self, response: engine_pb2.GenerateResponse) -> None:
        self._on_load(detok_pb2.EngineLoadReport(engine_address=self._address, load=response.load))


class EngineLinks:
    """The links to all engines in use. A link without work for long is closed.

    An async context manager; leaving it closes all links.
    """

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._links: dict[str, EngineLink] = {}
        self._listeners: list[LoadListener] = []
        self._closer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._closer = asyncio.create_task(self._keep_closing_idle())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._closer is not None:
            self._closer.cancel()
            await asyncio.gather(self._closer, return_exceptions=True)
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close() for link in links))

    @property
    def addresses(self) -> frozenset[str]:
        """Engines that a link is open to."""
        return frozenset(self._links)

    def link(self, address: str) -> EngineLink:
        """The link to the engine at host:port; InvalidRequest when it is not such an address."""
        link = self._links.get(address)
        if link is None:
            try:
                (target,) = parse_addresses(address)
            except ValueError as error:
                raise InvalidRequest(
                    f"engine_address is not host:port: {address!r}", param="engine_address"
                ) from error
            link = self._links[address] = EngineLink(target, self._report_load)
        return link

    @contextmanager
    def listening(self, listener: LoadListener) -> Iterator[None]:
        """Calls `listener` with the load that each response of any engine brings."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _report_load(self, report: detok_pb2.EngineLoadReport) -> None:
        for listener in self._listeners:
            listener(report)

    async def close_idle(self, now: float) -> None:
        """Closes the links that have been idle for long at `now`, a time of the event loop."""
        for address, link in list(self._links.items()):
            if link.seconds_idle(now) >= self._idle_seconds:
                # Out of the table first, so that no sequence is put on a closing link.
                del self._links[address]
                logger.info("closing the link to engine %s: no work", address)
                await link.close()

    async def _keep_closing_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._idle_seconds / 4)
            await self.close_idle(loop.time())
