"""A hostile round on a running line: other streams unharmed, nothing dead, nothing left over."""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from tests.fakes.raw_http import exchange
from tests.fakes.running_line import RunningLine
from tests.hostile.attack import HostileReport, run_hostile

_PATH: Final = "/v1/completions"
_NUM_STREAMS: Final = 6
# An ordinary stream that says nothing for so long is disturbed.
_SILENCE_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 30.0
# What memory may grow by over the round, once a first part of it has filled the caches. The calls
# that a gRPC server has waiting at most take 80 MB, which its allocator keeps.
_MAX_GROWTH_BYTES: Final = 192 << 20
# Pools open connections when they are first needed at once; what leaks, leaks per attack.
_MAX_MORE_DESCRIPTORS: Final = 6
_WARM_UP: Final = 0.25
_OWN_FRAME: Final = re.compile(
    r'File "[^"]*/(?:gateway|tokenizer_svc|detok_svc|engine_svc|protos|compose)/\w[^"]*", line \d+'
)
_GRPC_SERVICES: Final = {
    "tokenizer": "tokenizer_svc",
    "detok": "detok_svc",
    "engine": "engine_svc",
}


@dataclass(frozen=True)
class Footprint:
    pid: int
    num_descriptors: int
    num_threads: int
    memory_bytes: int


@dataclass
class HostileResult:
    """`faults` says what went wrong, if anything; `text` what was measured."""

    text: str = ""
    faults: list[str] = field(default_factory=list)


async def hostile_round(line: RunningLine, count: int, seed: int) -> HostileResult:
    """Attacks `line` while ordinary streams run; `line` must have one of each service."""
    result = HostileResult()
    references = [
        await _complete(line.url, number, line.state.model) for number in range(_NUM_STREAMS)
    ]
    await _attack(line, round(count * _WARM_UP), seed - 1)
    before = await _settled(line, None)
    started = time.monotonic()
    attack = asyncio.create_task(_attack(line, count, seed))
    streams = [
        asyncio.create_task(_streams_while(attack, line, number, references[number], result))
        for number in range(_NUM_STREAMS)
    ]
    report = await attack
    seconds = time.monotonic() - started
    num_streams = sum(await asyncio.gather(*streams))
    after = await _settled(line, before)
    _judge(report, before, after, line, result)
    result.text = _table(report, before, after, num_streams, seconds)
    return result


async def _attack(line: RunningLine, count: int, seed: int) -> HostileReport:
    ports = {name: _port(line, service) for name, service in _GRPC_SERVICES.items()}
    return await run_hostile(_port(line, "gateway"), ports, count, seed, line.state.model)


def _port(line: RunningLine, service: str) -> int:
    return int(line.service(service).address.rpartition(":")[2])


async def _complete(url: str, number: int, model: str) -> tuple[str, Any, Any]:
    """Text, finish reason and usage of an ordinary stream, greedy or seeded by its number."""
    body = {
        "model": model,
        "prompt": f"Stream {number} says",
        "max_tokens": 40,
        "temperature": 0.0 if number % 2 else 1.0,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    async with exchange(url, "POST", _PATH, {}, body, silence_seconds=_SILENCE_SECONDS) as answer:
        content = (await answer.body()).decode()
    assert answer.status == 200, content
    lines = [line.removeprefix("data: ") for line in content.split("\n") if line[:5] == "data:"]
    assert lines[-1] == "[DONE]", content
    events = [json.loads(line) for line in lines[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"], events[-1]["usage"]


async def _streams_while(
    attack: "asyncio.Task[HostileReport]",
    line: RunningLine,
    number: int,
    reference: tuple[str, Any, Any],
    result: HostileResult,
) -> int:
    """Runs one stream after the other until the attack is over; returns how many."""
    num_streams = 0
    while not attack.done():
        num_streams += 1
        try:
            answer = await _complete(line.url, number, line.state.model)
        except (OSError, AssertionError) as error:
            result.faults.append(f"stream {number} broke: {error!r}")
            continue
        if _without_cache(answer) != _without_cache(reference):
            result.faults.append(f"stream {number} differs: {answer} != {reference}")
    return num_streams


def _without_cache(answer: tuple[str, Any, Any]) -> tuple[str, Any, Any]:
    """Whether a prompt was in the cache is no part of the answer."""
    text, reason, usage = answer
    return text, reason, {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def footprints(line: RunningLine) -> dict[str, Footprint]:
    """Of each process of the line; one that is gone has none."""
    found = {}
    for service in line.state.services:
        process = psutil.Process(service.pid)
        found[service.name] = Footprint(
            service.pid,
            process.num_fds(),
            process.num_threads(),
            process.memory_info().rss,
        )
    return found


async def _settled(
    line: RunningLine, before: Mapping[str, Footprint] | None
) -> dict[str, Footprint]:
    """The footprints once no more descriptors are open than before, or do not change any more."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    last = footprints(line)
    while time.monotonic() < deadline:
        await asyncio.sleep(2.5)
        now = footprints(line)
        if before is None:
            if all(now[name].num_descriptors == last[name].num_descriptors for name in now):
                break
        elif all(
            now[name].num_descriptors <= before[name].num_descriptors + _MAX_MORE_DESCRIPTORS
            for name in before
        ):
            return now
        last = now
    return last


def _judge(
    report: HostileReport,
    before: Mapping[str, Footprint],
    after: Mapping[str, Footprint],
    line: RunningLine,
    result: HostileResult,
) -> None:
    result.faults += [f"5xx: {text}" for text in report.server_errors]
    result.faults += [f"no connection: {text}" for text in report.unreachable]
    for name, old in before.items():
        new = after[name]
        if new.pid != old.pid:
            result.faults.append(f"{name} was restarted")
            continue
        if new.num_descriptors > old.num_descriptors + _MAX_MORE_DESCRIPTORS:
            result.faults.append(
                f"{name} has {new.num_descriptors} descriptors, before {old.num_descriptors}"
            )
        if new.memory_bytes - old.memory_bytes > _MAX_GROWTH_BYTES:
            result.faults.append(f"{name} grew by {new.memory_bytes - old.memory_bytes} bytes")
    # Those in which only the gRPC library has a part say that a caller sent nonsense.
    frames = _OWN_FRAME.findall(line.output)
    if frames:
        result.faults.append(f"{len(frames)} frames of ours in tracebacks, such as {frames[0]}")


def _table(
    report: HostileReport,
    before: Mapping[str, Footprint],
    after: Mapping[str, Footprint],
    num_streams: int,
    seconds: float,
) -> str:
    statuses = ", ".join(
        f"{status}: {number}" for status, number in sorted(report.statuses.items())
    )
    rows = [
        f"{report.num_attacks} attacks in {seconds:.0f} s; HTTP answers by status: {statuses}",
        f"{num_streams} other streams meanwhile",
        "process        descriptors   threads   memory, MiB   (before → after)",
    ]
    for name, old in before.items():
        new = after[name]
        rows.append(
            f"{name:14} {old.num_descriptors:4} → {new.num_descriptors:4}   "
            f"{old.num_threads:3} → {new.num_threads:3}   "
            f"{old.memory_bytes / 2**20:6.1f} → {new.memory_bytes / 2**20:6.1f}"
        )
    return "\n".join(rows)
