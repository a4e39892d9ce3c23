"""A TCP relay in front of a server, which holds what the server says back for a while."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_CHUNK_BYTES = 1 << 16


@asynccontextmanager
async def delaying_relay(port: int, delay_seconds: float) -> AsyncIterator[int]:
    """Yields the port that leads to 127.0.0.1:`port`; each chunk back comes that much later."""

    async def copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_seconds: float
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(delay_seconds)
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(copy(reader, back, 0.0))
                group.create_task(copy(there, writer, delay_seconds))
        finally:
            for one in (writer, back):
                one.close()

    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(carry(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
