"""The server around the application: asleep while nothing happens, and awake at once when told."""

import asyncio
import email.utils
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from gateway import server as server_module
from gateway.connection_limits import ConnectionLimits
from gateway.server import Server, uvicorn_config
from tests.fakes.waiting import DEADLINE_SECONDS


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


@asynccontextmanager
async def serving(kind: type[Server] = Server) -> AsyncIterator[str]:
    """The address of a server; leaving waits until it has stopped."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = kind(uvicorn_config(application, ConnectionLimits()))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        await asyncio.wait_for(task, DEADLINE_SECONDS)


async def test_it_stops_when_told_however_long_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_DATE_SECONDS", 1000.0)
    num_ticks = 0

    class Counted(Server):
        async def on_tick(self, counter: int) -> bool:
            nonlocal num_ticks
            num_ticks += 1
            return await super().on_tick(counter)

    async with serving(Counted) as url, httpx2.AsyncClient() as client:
        assert (await client.get(url)).text == "here"
        await asyncio.sleep(0.5)
        assert num_ticks == 1
    assert num_ticks == 2


async def test_the_date_of_a_response_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_DATE_SECONDS", 0.05)
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        serving() as url,
        httpx2.AsyncClient() as client,
    ):
        first, seconds = (await client.get(url)).headers["date"], 0.0
        while seconds < 1:
            await asyncio.sleep(0.2)
            told = email.utils.parsedate_to_datetime((await client.get(url)).headers["date"])
            seconds = (told - email.utils.parsedate_to_datetime(first)).total_seconds()
            assert abs(told.timestamp() - time.time()) < DEADLINE_SECONDS
