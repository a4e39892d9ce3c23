"""Must-show 2: thousands of requests given up at random stages leave nothing behind."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio

from tests.chaos.client import DONE, sse_events
from tests.chaos.footprint import Footprint, footprints
from tests.chaos.line import ChaosLine
from tests.chaos.report import Table
from tests.chaos.rounds import wait_idle
from tests.chaos.workload import CHAT, TEXT
from tests.fakes.raw_http import Broken, exchange

_NUM_AT_ONCE: Final = 48
_SILENCE_SECONDS: Final = 30.0
_SETTLE_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.2
# Sizes of caches and of the allocator's arenas go up and down by this much.
_ALLOWED_GROWTH_MIB: Final = 8.0
_ALLOWED_GROWTH_RATIO: Final = 0.05
# Calls that ask whether others are there, and pools that grow to the most that was used at once.
_ALLOWED_TASKS: Final = 24
_ALLOWED_FILES: Final = 10

STAGES: Final = (
    "none",
    "at once",
    "before the first event",
    "between events",
    "cancelled by id",
    "cancelled by id at another gateway",
    "timeout",
    "with a key",
)


@dataclass(frozen=True)
class Abort:
    """One request, and when it is given up."""

    number: int
    stage: str
    path: str
    body: dict[str, Any]
    num_events: int
    seconds: float


def make_aborts(model: str, num_requests: int, seed: int) -> list[Abort]:
    source = random.Random(seed)
    return [_make(number, model, source) for number in range(num_requests)]


def _make(number: int, model: str, source: random.Random) -> Abort:
    stage = source.choice(STAGES)
    path = source.choice((CHAT, TEXT))
    prompt = "the quick brown fox " * source.choice((1, 2, 5, 60))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": source.randint(2, 40),
        "seed": number,
        "ignore_eos": True,
        "stream": source.random() < 0.8 or stage == "between events",
        "n": source.choice((1, 1, 1, 2)),
    }
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": f"{number} {prompt}"}]
    else:
        body["prompt"] = f"{number} {prompt}"
    if stage == "timeout":
        body["timeout"] = source.uniform(0.005, 0.3)
    return Abort(number, stage, path, body, source.randint(1, 20), source.uniform(0.0, 0.05))


async def run_aborts(
    line: ChaosLine,
    model: str,
    num_requests: int,
    seed: int,
    say: Callable[[str], None],
    *,
    judges_memory: bool,
) -> Table:
    """Runs them all; the table says what is left of them.

    judges_memory: whether growth is a failure; a short run has not come to its steady size.
    """
    aborts = make_aborts(model, num_requests, seed)
    statuses: Counter[str] = Counter()
    phases = []
    for tenth in range(10):
        await _run(
            line, aborts[tenth * num_requests // 10 : (tenth + 1) * num_requests // 10], statuses
        )
        phases.append(await _settled(line, phases[0] if tenth == 9 else None))
    try:
        await wait_idle(line, _SETTLE_SECONDS)
        leftover = ""
    except TimeoutError as error:
        leftover = str(error)
    say(f"answers: {dict(sorted(statuses.items()))}")
    for name in phases[0]:
        sizes = " ".join(f"{found[name].resident_mib:.0f}" for found in phases)
        say(f"  {name}: MiB after each tenth: {sizes}")
    return await _judged(line, phases, statuses, leftover, say, judges_memory=judges_memory)


async def _settled(
    line: ChaosLine, before: dict[str, Footprint] | None = None
) -> dict[str, Footprint]:
    """What is held once nothing is left to do, and no more than `before`, or after a while."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        found = await footprints(line)
        is_quiet = before is None or not any(
            _left_over(before[name], footprint) for name, footprint in found.items()
        )
        loads = await line.engine_loads()
        is_idle = not any(load.num_running or load.num_waiting for load in loads)
        if (is_quiet and is_idle) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_SECONDS)


def _left_over(before: Footprint, after: Footprint) -> list[str]:
    found = []
    if after.num_tasks > before.num_tasks + _ALLOWED_TASKS:
        more = after.tasks - before.tasks
        found.append(f"{after.num_tasks - before.num_tasks} tasks more: {dict(more)}")
    if after.num_threads > before.num_threads + 1:
        found.append(f"{after.num_threads - before.num_threads} threads more")
    if after.num_files > before.num_files + _ALLOWED_FILES:
        found.append(f"{after.num_files - before.num_files} file descriptors more")
    return found


async def _judged(
    line: ChaosLine,
    phases: Sequence[dict[str, Footprint]],
    statuses: Counter[str],
    leftover: str,
    say: Callable[[str], None],
    *,
    judges_memory: bool,
) -> Table:
    warm, middle, end = phases[0], phases[4], phases[-1]
    table = Table(
        "process tasks threads files memory growth",
        (
            "at the end, with the change since a tenth of the requests; memory in MiB; "
            "growth: over the second half"
        ),
    )
    for name in end:
        first, half, last = warm[name], middle[name], end[name]
        growth = last.resident_mib - half.resident_mib
        allowed = max(_ALLOWED_GROWTH_MIB, _ALLOWED_GROWTH_RATIO * half.resident_mib)
        left_over = _left_over(first, last)
        for phrase in left_over:
            say(f"  {name}: {phrase}")
        table.add(
            name,
            f"{last.num_tasks} ({last.num_tasks - first.num_tasks:+})",
            f"{last.num_threads} ({last.num_threads - first.num_threads:+})",
            f"{last.num_files} ({last.num_files - first.num_files:+})",
            f"{last.resident_mib:.1f}",
            f"{growth:+.1f}",
            is_good=not left_over and (growth <= allowed or not judges_memory),
        )
    num_keys, eternal = await keys_without_ttl(line)
    table.add("redis keys", num_keys, "", "", "without TTL:", len(eternal), is_good=not eternal)
    for key in eternal[:5]:
        say(f"  without TTL: {key}")
    loads = await line.engine_loads()
    for index, load in enumerate(loads):
        taken = load.num_blocks - load.num_free_blocks
        table.add(
            f"engine-{index + 1} requests",
            f"run {load.num_running}", f"wait {load.num_waiting}", "", "blocks taken:", taken,
            is_good=not (leftover or taken or load.num_running or load.num_waiting),
        )  # fmt: skip
    failed = sum(count for status, count in statuses.items() if status.startswith(("5", "broken")))
    table.add("failed", failed, "", "", "of", statuses.total(), is_good=not failed)
    return table


async def keys_without_ttl(line: ChaosLine) -> tuple[int, list[str]]:
    """How many keys Redis has, and those that would stay for ever."""
    client = redis.asyncio.from_url(line.redis_url, decode_responses=True)
    try:
        keys = [key async for key in client.scan_iter(count=1000)]
        async with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.ttl(key)
            lives = await pipeline.execute()
        return len(keys), [key for key, life in zip(keys, lives, strict=True) if life == -1]
    finally:
        await client.aclose()


async def _run(line: ChaosLine, aborts: Sequence[Abort], statuses: Counter[str]) -> None:
    waiting = iter(aborts)

    async def work() -> None:
        for abort in waiting:
            statuses[await _request(line, abort)] += 1

    await asyncio.gather(*(work() for _ in range(_NUM_AT_ONCE)))


async def _request(line: ChaosLine, abort: Abort) -> str:
    """Sends it and gives it up; says what it was answered, or "broken" and why."""
    request_id = f"abort-{abort.number}"
    headers = {"x-request-id": request_id}
    if abort.stage == "with a key":
        headers["idempotency-key"] = request_id
    url = line.direct_urls[abort.number % len(line.direct_urls)]
    reading = asyncio.create_task(_read(url, abort, headers))
    try:
        if abort.stage in ("at once", "before the first event", "with a key"):
            # The time at which it is given up is drawn; nothing is waited for.
            seconds = abort.seconds if abort.stage != "at once" else abort.seconds / 20
            done, _ = await asyncio.wait((reading,), timeout=seconds)
            return reading.result() if done else "given up"
        if abort.stage.startswith("cancelled by id"):
            await asyncio.wait((reading,), timeout=abort.seconds)
            others = abort.stage.endswith("another gateway")
            await _cancel(line.direct_urls[(abort.number + others) % 2], request_id)
        return await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _read(url: str, abort: Abort, headers: dict[str, str]) -> str:
    num_events = 0
    try:
        async with exchange(
            url, "POST", abort.path, headers, abort.body, silence_seconds=_SILENCE_SECONDS
        ) as answer:
            if answer.status != 200 or not abort.body["stream"]:
                body = await answer.body()
                return f"{answer.status}" if answer.status < 500 else f"{answer.status} {body!r}"
            async for _, data in sse_events(answer):
                num_events += 1
                if data == DONE:
                    return "200"
                if abort.stage == "between events" and num_events >= abort.num_events:
                    return "left"
        return "broken: no [DONE]"
    except (Broken, OSError) as error:
        return f"broken: {error}"


async def _cancel(url: str, request_id: str) -> None:
    try:
        async with exchange(
            url, "DELETE", f"/v1/requests/{request_id}", {}, silence_seconds=_SILENCE_SECONDS
        ) as answer:
            await answer.body()
    except (Broken, OSError) as error:
        raise RuntimeError(f"DELETE /v1/requests/{request_id}: {error}") from error
