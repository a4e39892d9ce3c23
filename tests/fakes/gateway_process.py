"""A gateway in a process of its own beside a line's, so that it can be killed or stopped."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

from gateway.settings import Settings
from tests.fakes.gateway_line import until_ready
from tests.fakes.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent


class GatewayProcess:
    """`client` speaks to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: int, client: httpx2.AsyncClient
    ) -> None:
        self.client = client
        self.port = port
        self._process = process

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, to its end."""
        self.send_signal(signal.SIGTERM)
        await asyncio.wait_for(self._process.wait(), 30)


@asynccontextmanager
async def gateway_process(settings: Settings, **fields: object) -> AsyncIterator[GatewayProcess]:
    """Another gateway of the line that `settings` describe, ready; killed at the end."""
    port = free_port()
    flags = {
        "tokenizer": ",".join(settings.tokenizer),
        "detok": ",".join(settings.detok),
        "engine": ",".join(settings.engine),
        "redis": settings.redis,
        "redis-prefix": settings.redis_prefix,
        "ping-seconds": settings.ping_seconds,
        "drain-seconds": settings.drain_seconds,
        "port": port,
        **fields,
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx2.AsyncClient(base_url=url, timeout=30.0) as client:
            await until_listening(client)
            await until_ready(client)
            yield GatewayProcess(process, port, client)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_listening(client: httpx2.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await client.get("/healthz")
                return
            except httpx2.TransportError:
                await asyncio.sleep(0.05)
