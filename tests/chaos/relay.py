"""A TCP relay in front of a service, which can cut, hold or refuse the connections through it."""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psutil

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_CHUNK_BYTES: Final = 1 << 16
_CONNECT_SECONDS: Final = 5.0

Predicate = Callable[["Connection"], bool]


def every(connection: "Connection") -> bool:
    """All connections."""
    return True


class Connection:
    """One connection through a relay. Held, it carries nothing in either direction."""

    def __init__(self, caller_port: int) -> None:
        self.caller_port = caller_port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: list[asyncio.StreamWriter] = []

    def hold(self) -> None:
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    def reset(self) -> None:
        """Ends both sides with an RST."""
        for writer in self._writers:
            reset(writer)
        self.release()

    async def carry(
        self, caller: tuple[asyncio.StreamReader, asyncio.StreamWriter], port: int
    ) -> None:
        """Forwards between the caller and 127.0.0.1:port until one of them is gone."""
        self._writers.append(caller[1])
        try:
            await self._flowing.wait()
            callee = await asyncio.wait_for(
                asyncio.open_connection("127.0.0.1", port), _CONNECT_SECONDS
            )
            self._writers.append(callee[1])
            await asyncio.gather(
                self._forward(caller[0], callee[1]), self._forward(callee[0], caller[1])
            )
        # A RuntimeError is uvloop's word for a connection that was reset.
        except (OSError, TimeoutError, RuntimeError):
            # One side failed, so the other must see a failure too, and not a clean end.
            self.reset()
        finally:
            for writer in self._writers:
                writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            await self._flowing.wait()
            writer.write(chunk)
            await writer.drain()
        await self._flowing.wait()
        if writer.can_write_eof():
            writer.write_eof()


class Relay:
    """Listens on `port` for the service at `target_port`. An async context manager by `open`."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._held: list[Predicate] = []
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def open(self) -> None:
        """Begins to listen, on the same port as before if there was one."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """New connections are refused from now on; those there are stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def close(self) -> None:
        self.refuse()
        self.reset()
        tasks = list(self._connections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reset(self, which: Predicate = every) -> int:
        """Ends connections with an RST; returns how many."""
        chosen = [connection for connection in self._connections if which(connection)]
        for connection in chosen:
            connection.reset()
        return len(chosen)

    def hold(self, present: Predicate, new: Predicate) -> None:
        """A black hole, for some of the present connections and of new ones, until `release`."""
        self._held.append(new)
        for connection in self._connections:
            if present(connection):
                connection.hold()

    def release(self) -> None:
        self._held.clear()
        for connection in self._connections:
            connection.release()

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer.get_extra_info("peername")[1])
        if any(which(connection) for which in self._held):
            connection.hold()
        task = asyncio.create_task(connection.carry((reader, writer), self.target_port))
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection, None))


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with an RST instead of a FIN."""
    with suppress(OSError, AttributeError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


def local_ports(pid: int) -> frozenset[int]:
    """The ports of the TCP sockets that a process has."""
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return frozenset()
    return frozenset(entry.laddr.port for entry in sockets if entry.laddr)
