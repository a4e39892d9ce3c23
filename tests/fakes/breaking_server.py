"""An HTTP server that streams a scripted answer, and breaks its connections on the way."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BreakingServer:
    """Streams `words` as a chat, one token each, with usage, to the rules of the reconnect.

    breaks: after how many events each connection in turn is reset; None: never. A connection
    beyond the list is not broken. refusals: as many requests first get a 503.
    """

    words: Sequence[str]
    breaks: Sequence[int | None] = ()
    refusals: int = 0
    port: int = 0
    # Of each request that was not refused: its headers, with lower-case names.
    requests: list[dict[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["BreakingServer"]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = (line.partition(": ") for line in head.strip().split("\r\n")[1:])
            headers = {name.lower(): value for name, _, value in fields}
            await reader.readexactly(int(headers.get("content-length", 0)))
            if self.refusals > 0:
                self.refusals -= 1
                writer.write(
                    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 0\r\n"
                    b"content-length: 0\r\n\r\n"
                )
                return
            self.requests.append(headers)
            self._stream(writer, headers)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    def _stream(self, writer: asyncio.StreamWriter, headers: dict[str, str]) -> None:
        number = len(self.requests) - 1
        limit = self.breaks[number] if number < len(self.breaks) else None
        covered = int(headers.get("last-event-id", 0))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        events = [event for event in self._events() if event[0] > covered or event[0] < 0]
        for event_number, (event_id, data) in enumerate(events):
            shown = len(self.words) if event_id < 0 else event_id
            content = f"id: {shown}\ndata: {data}\n\n".encode()
            if event_number == limit:
                # The event is there, but for its end: no event.
                content = content[:-1]
            writer.write(b"%x\r\n%s\r\n" % (len(content), content))
            if event_number == limit:
                return
        writer.write(b"0\r\n\r\n")

    def _events(self) -> list[tuple[int, str]]:
        """Each with its id; -1 for what comes after the last token, which has its id again."""
        last = len(self.words)
        events: list[tuple[int, str]] = []
        for number, word in enumerate(self.words, 1):
            finish = "stop" if number == last else None
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": finish}
            events.append((number, _chunk([choice])))
        usage = {"prompt_tokens": 3, "completion_tokens": last, "total_tokens": last + 3}
        return [*events, (-1, _chunk([], usage)), (-1, "[DONE]")]


def _chunk(choices: list[Any], usage: dict[str, int] | None = None) -> str:
    return json.dumps({"object": "chat.completion.chunk", "choices": choices, "usage": usage})
