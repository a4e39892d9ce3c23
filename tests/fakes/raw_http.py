"""One HTTP/1.1 exchange over a plain socket, with the answer's bytes as they come."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit


class Broken(ConnectionError):
    """The connection ended, or was silent for too long, before the answer was complete."""


class RawAnswer:
    """An answer whose head has come. `headers` have lower-case names."""

    def __init__(
        self, status: int, headers: dict[str, str], reader: asyncio.StreamReader, silence: float
    ) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader
        self._silence = silence

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body; Broken when it ends early, or nothing comes for `silence` seconds."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(await within(self._silence, self._reader.readline()) or b"-1", 16):
                if size < 0:
                    raise Broken("the connection ended in mid-answer")
                yield (await within(self._silence, self._reader.readexactly(size + 2)))[:-2]
            return
        left = int(self.headers.get("content-length", 1 << 62))
        while left and (
            piece := await within(self._silence, self._reader.read(min(left, 1 << 16)))
        ):
            left -= len(piece)
            yield piece
        if left and "content-length" in self.headers:
            raise Broken("the connection ended in mid-answer")

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


async def within(seconds: float, reading: Any) -> Any:
    """What `reading` gives; Broken when it fails, or takes longer."""
    try:
        return await asyncio.wait_for(reading, seconds)
    except (TimeoutError, asyncio.IncompleteReadError, OSError, ValueError) as error:
        raise Broken(f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def exchange(
    url: str,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: Any = None,
    *,
    silence_seconds: float,
) -> AsyncIterator[RawAnswer]:
    """Sends one request and yields its answer; leaving the block resets the connection.

    silence_seconds: how long nothing may come, at any point, before it is Broken.
    """
    parts = urlsplit(url)
    reader, writer = await within(
        silence_seconds, asyncio.open_connection(parts.hostname, parts.port)
    )
    try:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"host: {parts.netloc}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(content)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        head = (await within(silence_seconds, reader.readuntil(b"\r\n\r\n"))).decode("latin-1")
        first, *rest = head.strip().split("\r\n")
        fields = (line.partition(":") for line in rest)
        named = {name.strip().lower(): value.strip() for name, _, value in fields}
        yield RawAnswer(int(first.split()[1]), named, reader, silence_seconds)
    finally:
        writer.transport.abort()
