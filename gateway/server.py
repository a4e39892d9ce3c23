"""The gateway process: listens, serves until told to stop, drains, leaves nothing behind."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import uvicorn

from gateway.app import Gateway
from gateway.connection_limits import (
    BACKLOG,
    ConnectionLimits,
    Connections,
    connection_capacity,
    watch_peers,
)
from gateway.http_protocol import HttpProtocol
from gateway.liveness import make_owner
from gateway.redis_client import open_redis
from gateway.settings import Settings
from protos.wire.listening import check_listening
from protos.wire.service import install_stop_signals

logger = logging.getLogger(__name__)

# How long requests that were cancelled by the drain have to say so to their clients.
_CANCEL_GRACE_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 3
# How exact the date in responses is.
_DATE_SECONDS: Final = 1.0


class Server(uvicorn.Server):
    """uvicorn, with the process's signals left to us, and asleep while there is nothing to do.

    Its own loop looks ten times a second whether `should_exit` is set: `stop` says so at once.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        # A tick whose number is 0 writes the date that responses carry.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: Settings) -> None:
    """The body of the process."""
    await serve_until(settings, install_stop_signals())


async def serve_until(
    settings: Settings, stop: asyncio.Event, bound: "asyncio.Future[int] | None" = None
) -> None:
    """Serves until `stop`, then drains. `bound` is told the port once connections are accepted."""
    limits = ConnectionLimits(
        max_connections=connection_capacity(settings.max_connections),
        send_timeout_seconds=settings.send_timeout_seconds,
    )
    with _listen(settings.host, settings.port) as listener:
        watch_peers(listener, limits.send_timeout_seconds)
        port = listener.getsockname()[1]
        owner = make_owner(settings.host, port)
        async with open_redis(settings.redis) as redis, Gateway(settings, redis, owner) as gateway:
            server = Server(uvicorn_config(gateway.app, limits))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                logger.info("listening on http://%s:%d", settings.host, port)
                if bound is not None:
                    bound.set_result(port)
                await _until_stopped(stop, serving)
                await drain(gateway, settings.drain_seconds)
            finally:
                server.stop()
                await serving


async def drain(gateway: Gateway, drain_seconds: float) -> None:
    """Takes no more requests, gives those in progress their time, then leaves them to other
    gateways; those that nobody could go on with are cancelled.
    """
    admission = gateway.admission
    admission.draining = gateway.runs.draining = True
    logger.info("draining; requests in progress: %d", len(admission.records()))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(admission.until_empty(), drain_seconds)
    gateway.runs.hand_over()
    # The runs' tasks take note of it, and what was handed over is not cancelled.
    await asyncio.sleep(0)
    admission.cancel_all()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(admission.until_empty(), _CANCEL_GRACE_SECONDS)
    admission.cancel_all()


async def _until_stopped(stop: asyncio.Event, serving: "asyncio.Task[None]") -> None:
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopped, serving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()


def uvicorn_config(app: Any, limits: ConnectionLimits) -> uvicorn.Config:
    """How an ASGI application is served."""
    protocol: Any = partial(HttpProtocol, connections=Connections(limits))
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        backlog=BACKLOG,
    )


def _listen(host: str, port: int) -> socket.socket:
    check_listening(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
