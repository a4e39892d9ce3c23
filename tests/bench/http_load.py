"""A light load generator: many streamed completions at once over raw sockets.

It parses no more of an answer than it must, so that on a machine shared with the servers the
servers, not the generator, are what is measured.
"""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One streamed answer. Times are in seconds since its request was sent."""

    num_tokens: int
    num_reads: int
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    streams: Sequence[StreamResult]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


async def run_load(port: int, bodies: Sequence[dict[str, Any]], concurrency: int) -> LoadResult:
    """Streams every body from 127.0.0.1:`port`/v1/completions, `concurrency` at a time.

    Raises RuntimeError when a stream does not end with `[DONE]` and its usage.
    """
    waiting = list(reversed(bodies))
    streams: list[StreamResult] = []

    async def worker() -> None:
        while waiting:
            streams.append(await _stream(port, waiting.pop()))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return LoadResult(streams, time.perf_counter() - started)


async def _stream(port: int, body: dict[str, Any]) -> StreamResult:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        started = time.perf_counter()
        writer.write(head.encode() + payload)
        tail = b""
        num_reads = 0
        first_token_seconds = 0.0
        while data := await reader.read(1 << 18):
            num_reads += 1
            if not first_token_seconds and b'"text"' in data:
                first_token_seconds = time.perf_counter() - started
            tail = (tail + data)[-4096:]
        total_seconds = time.perf_counter() - started
    finally:
        writer.close()
    usage = _USAGE.search(tail)
    if usage is None or _END not in tail:
        raise RuntimeError(f"a stream broke; its end was {tail[-500:]!r}")
    return StreamResult(int(usage[1]), num_reads, first_token_seconds, total_seconds)
