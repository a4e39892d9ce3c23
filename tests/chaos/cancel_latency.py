"""Must-show 2, the second half: how soon after a cancel an engine's blocks are free again."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any, Final

import grpc

from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.chaos.client import sse_events
from tests.chaos.line import ChaosLine
from tests.chaos.report import Table
from tests.chaos.workload import TEXT
from tests.fakes.raw_http import exchange

LIMIT_SECONDS: Final = 0.05
_DEADLINE_SECONDS: Final = 10.0
_NUM_EVENTS: Final = 8


class Engines:
    """Asks the engines how many of their blocks are taken, over channels that stay open."""

    def __init__(self, stubs: list[Any]) -> None:
        self._stubs = stubs

    async def num_taken(self) -> int:
        answers = await asyncio.gather(
            *(stub.GetStatus(engine_pb2.GetStatusRequest(), timeout=5.0) for stub in self._stubs)
        )
        return sum(answer.load.num_blocks - answer.load.num_free_blocks for answer in answers)

    async def until_free(self) -> float:
        """Waits until no block is taken; returns the time, monotonic seconds."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while await self.num_taken():
            if time.monotonic() > deadline:
                raise TimeoutError("blocks of a cancelled request stay taken")
        return time.monotonic()


@asynccontextmanager
async def connected_engines(line: ChaosLine) -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{engine.port}"))
            for engine in line.replicas("engine")
        ]
        yield Engines([engine_pb2_grpc.EngineServiceStub(channel) for channel in channels])


async def measure_cancels(
    line: ChaosLine, model: str, num_samples: int, *, judges_time: bool
) -> Table:
    """One request at a time, given up in mid-stream in each of three ways."""
    table = Table(
        "cancel samples step p50 p99 worst",
        "ms from the cancel to free blocks; step: the median pause between two tokens before it, "
        f"which is taken off the three; p99 may be {LIMIT_SECONDS * 1000:.0f}",
    )
    async with connected_engines(line) as engines:
        for way in ("disconnect", "by id", "by id at another gateway"):
            samples = [
                await _sample(line, engines, model, way, number) for number in range(num_samples)
            ]
            step = statistics.median(step for _, step in samples)
            beyond = sorted(max(0.0, seconds - step) for seconds, step in samples)
            p99 = beyond[min(len(beyond) - 1, int(0.99 * len(beyond)))]
            numbers = (step, statistics.median(beyond), p99, beyond[-1])
            table.add(
                way.replace(" ", "_"),
                num_samples,
                *(f"{number * 1000:.1f}" for number in numbers),
                is_good=p99 <= LIMIT_SECONDS or not judges_time,
            )
    return table


async def _sample(
    line: ChaosLine, engines: Engines, model: str, way: str, number: int
) -> tuple[float, float]:
    """(seconds until the blocks were free, seconds of a step)."""
    urls = line.direct_urls
    request_id = f"cancel-{way.replace(' ', '-')}-{number}"
    body = {
        "model": model,
        "prompt": f"{number} " + "the quick brown fox " * 20,
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    times = []
    async with exchange(
        urls[0], "POST", TEXT, {"x-request-id": request_id}, body, silence_seconds=20.0
    ) as answer:
        assert answer.status == 200, await answer.body()
        async for _ in sse_events(answer):
            times.append(time.monotonic())
            if len(times) == _NUM_EVENTS:
                break
        started = time.monotonic()
        if way != "disconnect":
            url = urls[way != "by id"]
            # Sent and not waited for: what counts is when the blocks are free.
            cancelling = asyncio.create_task(_delete(url, request_id))
            freed = await engines.until_free()
            await cancelling
    if way == "disconnect":
        started = time.monotonic()
        freed = await engines.until_free()
    step = statistics.median(b - a for a, b in pairwise(times))
    return freed - started, step


async def _delete(url: str, request_id: str) -> None:
    async with exchange(
        url, "DELETE", f"/v1/requests/{request_id}", {}, silence_seconds=10.0
    ) as answer:
        assert answer.status == 200, await answer.body()
