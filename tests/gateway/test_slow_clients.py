"""Clients that are slow, silent, gone or too many: each costs little, and nobody else waits."""

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from gateway.connection_limits import ConnectionLimits, connection_capacity, watch_peers
from gateway.server import Server, uvicorn_config
from protos.wire.errors import StartupError
from tests.fakes.waiting import DEADLINE_SECONDS, until

POST = b"POST /echo HTTP/1.1\r\nhost: x\r\n"
LONG = ConnectionLimits(
    head_seconds=DEADLINE_SECONDS, body_silence_seconds=DEADLINE_SECONDS, idle_seconds=75
)


@dataclass
class Application:
    """Answers /echo with the size of the body, /fast at once, /flood without end, /held never."""

    connections: Collection[object] = ()
    num_held: int = 0
    num_sent: int = 0
    # Paths whose client left before the end of the answer.
    left: list[str] = field(default_factory=list)
    port: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/held":
            self.num_held += 1
            await _until_disconnected(receive)
            self.left.append(path)
            return
        body = b""
        if path == "/echo":
            while (message := await receive())["type"] == "http.request":
                body += message["body"]
                if not message["more_body"]:
                    break
            if message["type"] == "http.disconnect":
                self.left.append(path)
                return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/flood":
            gone = asyncio.create_task(_until_disconnected(receive))
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
                self.num_sent += 4096
                await asyncio.sleep(0)
            self.left.append(path)
            return
        await send({"type": "http.response.body", "body": str(len(body)).encode()})

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer


async def _until_disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[Application]:
    application = Application()
    listener = socket.create_server(("127.0.0.1", 0))
    watch_peers(listener, limits.send_timeout_seconds)
    application.port = listener.getsockname()[1]
    server = Server(uvicorn_config(application, limits))
    application.connections = server.server_state.connections
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield application
    finally:
        server.stop()
        await task


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Whatever comes until the server ends the connection."""
    return await asyncio.wait_for(reader.read(), DEADLINE_SECONDS)


def status_of(answer: bytes) -> int:
    return int(answer.split()[1]) if answer else 0


def error_of(answer: bytes) -> dict[str, Any]:
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    return error


async def drip(writer: asyncio.StreamWriter, data: bytes, every: float) -> None:
    """Byte by byte, until the other end closes."""
    with_each = iter(data)
    while not writer.is_closing() and (byte := next(with_each, None)) is not None:
        writer.write(bytes([byte]))
        await asyncio.sleep(every)


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"G", b"ET /" + b"a" * 1000),
        (b"GET /fast HTTP/1.1\r\nhost: x\r\n", b"x: " + b"a" * 1000),
        (b"\r\n", b"\r\n" * 500),
        # Not even where a whole request went before it.
        (b"GET /fast HTTP/1.1\r\nhost: x\r\n\r\nGET /fast HTTP/1.1\r\nx: y", b"z" * 1000),
    ],
)
@pytest.mark.parametrize("dripping", [False, True])
async def test_a_head_that_does_not_end_is_given_up(
    head: bytes, rest: bytes, dripping: bool
) -> None:
    async with serving(ConnectionLimits(head_seconds=0.2)) as application:
        reader, writer = await application.connect(head)
        dripped = asyncio.create_task(drip(writer, rest if dripping else b"", 0.02))
        answer = await all_of(reader)
        dripped.cancel()
        writer.close()
    last = answer[answer.rindex(b"HTTP/1.1 4") :]
    assert answer.count(b"HTTP/1.1 200") == head.count(b"\r\n\r\n")
    assert status_of(last) == 408
    assert error_of(last)["code"] == "request_too_slow"
    assert error_of(last)["type"] == "timeout_error"


@pytest.mark.parametrize("framing", [b"content-length: 100", b"transfer-encoding: chunked"])
async def test_a_body_that_stops_is_given_up(framing: bytes) -> None:
    async with serving(ConnectionLimits(body_silence_seconds=0.1)) as application:
        chunk = b"5\r\nhello\r\n" if b"chunked" in framing else b"hello"
        reader, writer = await application.connect(POST + framing + b"\r\n\r\n" + chunk)
        answer = await all_of(reader)
        writer.close()
        assert status_of(answer) == 408
        assert "nothing of it came" in error_of(answer)["message"]
        await until(lambda: application.left == ["/echo"])


async def test_a_body_that_drips_is_given_up_at_a_time_that_depends_on_its_size() -> None:
    limits = ConnectionLimits(
        body_silence_seconds=0.1, body_seconds=0.2, body_bytes_per_second=1000
    )
    async with serving(limits) as application:
        head = POST + b"content-length: 1000\r\n\r\n"
        reader, writer = await application.connect(head)
        dripped = asyncio.create_task(drip(writer, b"x" * 1000, 0.02))
        answer = await all_of(reader)
        dripped.cancel()
        assert status_of(answer) == 408 and "bytes came in" in error_of(answer)["message"]
        writer.close()
        # One that is ten times as fast has the time it needs.
        reader, writer = await application.connect(head)
        for _ in range(10):
            writer.write(b"x" * 100)
            await asyncio.sleep(0.05)
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_slow_request_behind_an_answer_does_not_end_the_answer() -> None:
    async with serving(ConnectionLimits(head_seconds=0.05)) as application:
        reader, writer = await application.connect(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\nGET /")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.3)
        assert application.left == []
        writer.close()
        await until(lambda: application.left == ["/held"])


async def test_a_connection_without_a_request_is_closed() -> None:
    async with serving(ConnectionLimits(idle_seconds=1)) as application:
        reader, writer = await application.connect()
        assert await all_of(reader) == b""
        writer.close()


async def test_a_client_that_pipelines_and_leaves_is_seen_to_leave() -> None:
    async with serving(LONG) as application:
        held = b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n"
        _, writer = await application.connect(held * 2)
        await until(lambda: application.num_held == 1)
        writer.close()
        await until(lambda: application.left == ["/held"])


async def test_a_pipelining_flood_is_answered_up_to_a_number() -> None:
    async with serving(LONG) as application:
        reader, writer = await application.connect(b"GET /fast HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        answer = await all_of(reader)
        writer.close()
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200") == 33


def _new_loop() -> asyncio.AbstractEventLoop:
    return uvloop.new_event_loop()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, _new_loop])
def test_readers_that_stop_are_ended_and_cost_little(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def body() -> None:
        async with serving(ConnectionLimits(send_timeout_seconds=1.0)) as application:
            clients = []
            for _ in range(32):
                client = socket.socket()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, ("127.0.0.1", application.port))
                await loop.sock_sendall(client, b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
                clients.append(client)
            # Another's answers come while these are stalled, and after.
            for _ in range(20):
                reader, writer = await application.connect(
                    b"GET /fast HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
                )
                assert status_of(await all_of(reader)) == 200
                writer.close()
            await until(lambda: len(application.left) == 32)
            # The write buffer, what the kernels hold unsent, and what the client's holds.
            assert application.num_sent / 32 < 256 << 10
            for client in clients:
                client.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, _new_loop])
def test_the_end_of_an_answer_that_nobody_takes_is_given_up(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The application is done with it; only the connection is left."""

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (8 << 20)})

    async def body() -> None:
        limits = ConnectionLimits(send_timeout_seconds=0.5)
        server = Server(uvicorn_config(large, limits))
        # Without the kernel's help, as where it lacks the option.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serve = asyncio.create_task(server.serve(sockets=[listener]))
            for header in (b"connection: close", b"x: y"):
                _, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n\r\n")
                await until(lambda: len(server.server_state.connections) == 1)
                await until(lambda: not server.server_state.connections)
                writer.close()
            server.stop()
            await serve

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body())


async def test_a_connection_too_many_closes_the_one_that_waited_longest() -> None:
    async with serving(ConnectionLimits(max_connections=3)) as application:
        held_reader, held = await application.connect(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
        first_reader, first = await application.connect()
        _, second = await application.connect()
        await until(lambda: len(application.connections) == 3 and application.num_held == 1)
        reader, writer = await application.connect(b"GET /fast HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await all_of(first_reader) == b""
        assert not held_reader.at_eof() and application.left == []
        for each in (held, first, second, writer):
            each.close()


async def test_a_connection_too_many_is_told_so_when_all_are_at_work() -> None:
    limits = ConnectionLimits(max_connections=2, max_refusals=1)
    async with serving(limits) as application:
        held = [
            await application.connect(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n") for _ in range(2)
        ]
        await until(lambda: application.num_held == 2)
        reader, writer = await application.connect()
        dropped_reader, dropped = await application.connect()
        answer = await all_of(reader)
        assert status_of(answer) == 503 and b"retry-after: 1\r\n" in answer
        assert error_of(answer)["code"] == "overloaded"
        assert await all_of(dropped_reader) == b""
        held[0][1].close()
        await until(lambda: application.left == ["/held"])
        reader, again = await application.connect(b"GET /fast HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        for each in (writer, dropped, again, held[1][1]):
            each.close()


def test_the_number_of_connections_fits_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 524_288)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: limits.update(now=to))
    assert connection_capacity(None) == 4096
    assert limits["now"] == (4096 + 64 + 2048 + 256, 524_288)
    limits["now"] = (1024, 4096)
    assert connection_capacity(None) == 4096 - 64 - 2048 - 256
    with pytest.raises(StartupError, match="--max-connections"):
        connection_capacity(4096)
    assert connection_capacity(100) == 100
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert connection_capacity(100_000) == 100_000
