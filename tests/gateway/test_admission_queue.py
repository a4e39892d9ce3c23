"""Requests that wait for an engine: in fair order, bounded, told when to come again."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from tests.fakes.gateway_line import MODEL, GatewayLine, eventually, gateway_line, whole_text
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

# An answer of many tokens at once.
LONG = DetokScript([output("x" * 5000, 5000, started=True, finish=common_pb2.FINISH_REASON_STOP)])
# What an engine is sent beyond what it runs.
LOOK_AHEAD = 2


class Gated:
    """A line whose sequences end one by one, as `release` says, in the order they were started."""

    def __init__(self, line: GatewayLine) -> None:
        self.line = line
        self._gates: list[asyncio.Event] = []
        self._num_released = 0
        self._tasks: list[asyncio.Task[httpx2.Response]] = []
        line.detok.script = self._script

    def _script(self, submit: detok_pb2.Submit) -> DetokScript:
        self._gates.append(asyncio.Event())
        return pieces("ok", gates={0: self._gates[-1]})

    @property
    def started(self) -> list[str]:
        return [submit.request_id for submit in self.line.detok.submitted]

    def release(self, count: int = 1) -> None:
        for _ in range(count):
            self._gates[self._num_released].set()
            self._num_released += 1

    async def until_started(self, count: int) -> None:
        await until(lambda: len(self.started) >= count, f"{count} starts, not {self.started}")

    async def until_waiting(self, count: int) -> None:
        async def num_waiting() -> float:
            return await metric(self.line, "tokenline_queued_requests")

        await eventually(num_waiting, lambda number: number == count)

    async def fill(self, num_waiting: int) -> "list[asyncio.Task[httpx2.Response]]":
        """Short answers, so that times to come again are short; then a full queue."""
        for number in range(10):
            measured = self.send(f"short{number}")
            await self.until_started(number + 1)
            self.release()
            assert (await measured).status_code == 200
        self.line.detok.submitted.clear()
        tasks = [self.send(f"r{number}") for number in range(2 + LOOK_AHEAD)]
        await self.until_started(len(tasks))
        tasks += [self.send(f"w{number}") for number in range(num_waiting)]
        await self.until_waiting(num_waiting)
        return tasks

    async def drain(self) -> None:
        """Releases whatever starts until everything has been answered."""
        while not all(task.done() for task in self._tasks):
            self.release(len(self._gates) - self._num_released)
            await asyncio.sleep(0.01)

    def send(self, request_id: str, **fields: Any) -> "asyncio.Task[httpx2.Response]":
        headers = {"x-request-id": request_id}
        if key := fields.pop("key", None):
            headers["authorization"] = f"Bearer {key}"
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 10, **fields}
        task = asyncio.create_task(
            self.line.client.post("/v1/completions", json=body, headers=headers)
        )
        self._tasks.append(task)
        return task


async def metric(line: GatewayLine, name: str) -> float:
    text = (await line.client.get("/metrics")).text
    (sample,) = [row for row in text.splitlines() if row.startswith(f"{name} ")]
    return float(sample.split()[1])


@asynccontextmanager
async def gated_line(valkey: Valkey, prefix: str, **fields: Any) -> AsyncIterator[Gated]:
    async with gateway_line(
        valkey.url, redis_prefix=prefix, **{"max_num_seqs": 2, **fields}
    ) as line:
        gated = Gated(line)
        try:
            yield gated
        finally:
            await gated.drain()


def keys_file(directory: Path, *names: str) -> Path:
    path = directory / "keys"
    path.write_text(
        "".join(f"{name}:{hashlib.sha256(name.encode()).hexdigest()}\n" for name in names)
    )
    return path


async def test_an_engine_gets_little_more_than_it_runs(valkey: Valkey, redis_prefix: str) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=20) as gated:
        tasks = []
        for number in range(10):
            tasks.append(gated.send(f"r{number}"))
            await until(lambda: len(gated.started) + 1 >= min(len(tasks), 2 + LOOK_AHEAD))
        await gated.until_waiting(10 - 2 - LOOK_AHEAD)
        assert len(gated.started) == 2 + LOOK_AHEAD
        record = await gated.line.record("r9")
        assert record["state"] == "waiting"
        for number in range(5, 11):
            gated.release()
            await gated.until_started(number)
            assert len(gated.started) == number
        gated.release(4)
        assert [whole_text(await task) for task in tasks] == ["ok"] * 10


async def test_a_flood_of_one_key_does_not_hold_up_another(
    valkey: Valkey, redis_prefix: str, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path, "flood", "lone")
    async with gated_line(
        valkey, redis_prefix, api_keys=keys, public_metrics=True, max_queued_requests=16
    ) as gated:
        # Ten times what the engine runs, and the queue is full of it.
        flood = [gated.send(f"f{number}", key="flood", prompt=f"{number}") for number in range(40)]
        await gated.until_started(4)
        await gated.until_waiting(16)
        gated.line.detok.submitted.clear()
        lone = gated.send("lone", key="lone")
        # One of the flood makes room.
        await until(lambda: sum(task.done() for task in flood) == 40 - 4 - 16 + 1)
        gated.release()
        await gated.until_started(1)
        assert gated.started == ["lone"]
        gated.release(4)
        assert whole_text(await lone) == "ok"
        await gated.drain()
        statuses = [(await task).status_code for task in flood]
        assert statuses.count(200) == 4 + 16 - 1
        assert statuses.count(429) == 40 - statuses.count(200)


async def test_keys_take_turns(valkey: Valkey, redis_prefix: str, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, "a", "b")
    async with gated_line(
        valkey, redis_prefix, api_keys=keys, public_metrics=True, max_queued_requests=20
    ) as gated:
        tasks = [gated.send(f"first{number}", key="a") for number in range(4)]
        await gated.until_started(4)
        gated.line.detok.submitted.clear()
        for key in "ab":
            tasks += [gated.send(f"{key}{number}", key=key) for number in range(6)]
        await gated.until_waiting(12)
        for number in range(1, 9):
            gated.release()
            await gated.until_started(number)
        names = [name[0] for name in gated.started]
        # Within one request of each, and what those that ended first gave back.
        assert abs(names.count("a") - names.count("b")) <= 2
        await gated.drain()
        assert {(await task).status_code for task in tasks} == {200}


async def test_within_a_key_priority_goes_first(valkey: Valkey, redis_prefix: str) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=20) as gated:
        tasks = [gated.send(f"first{number}") for number in range(4)]
        await gated.until_started(4)
        for number, priority in enumerate((5, 0, -5)):
            tasks.append(gated.send(f"p{priority}", priority=priority))
            await gated.until_waiting(number + 1)
        gated.release(3)
        await gated.until_started(7)
        assert gated.started[4:] == ["p-5", "p0", "p5"]
        await gated.drain()
        assert {(await task).status_code for task in tasks} == {200}


async def test_who_is_refused_and_comes_when_told_is_let_in_before_newcomers(
    valkey: Valkey, redis_prefix: str
) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=4) as gated:
        tasks = await gated.fill(4)
        refused = await gated.send("told", prompt="mine")
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("too_many_requests", "rate_limit_error")
        seconds = int(refused.headers["retry-after"])
        assert seconds >= 1
        assert int(refused.headers["retry-after-ms"]) == 1000 * seconds
        assert f"try again in {seconds} s" in error["message"]
        # What drains is kept for those who were told.
        gated.release(2)
        await gated.until_waiting(2)
        await asyncio.sleep(seconds)
        assert (await gated.send("newcomer", prompt="another")).status_code == 429
        again = gated.send("told-again", prompt="mine")
        await gated.until_waiting(3)
        await gated.drain()
        assert whole_text(await again) == "ok"
        assert {(await task).status_code for task in tasks} == {200}
        assert await metric(gated.line, 'tokenline_ended_promises_total{end="kept"}') == 1


async def test_promises_cannot_be_used_to_exceed_the_bound(
    valkey: Valkey, redis_prefix: str
) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=4) as gated:
        await gated.fill(4)
        refused = [await gated.send(f"told{number}", prompt=f"{number}") for number in range(8)]
        await asyncio.sleep(max(int(response.headers["retry-after"]) for response in refused))
        gated.release(3)
        await gated.until_waiting(1)
        again = [gated.send(f"told{number}", prompt=f"{number}") for number in range(8)]
        await until(lambda: sum(task.done() for task in again) == 5)
        await gated.until_waiting(4)
        await gated.drain()
        statuses = [(await task).status_code for task in again]
        assert (statuses.count(200), statuses.count(429)) == (3, 5)


async def test_the_tokens_that_wait_are_bounded_too(valkey: Valkey, redis_prefix: str) -> None:
    async with gated_line(
        valkey, redis_prefix, max_queued_requests=100, max_queued_tokens=500
    ) as gated:
        tasks = [gated.send(f"r{number}") for number in range(4)]
        await gated.until_started(4)
        # A request of any length may be the one that waits.
        tasks.append(gated.send("long", prompt="x " * 600))
        await gated.until_waiting(1)
        assert (await gated.send("next", max_tokens=10)).status_code == 429
        text = (await gated.line.client.get("/metrics")).text
        assert 'tokenline_refused_requests_total{reason="queued_tokens"} 1.0' in text
        await gated.drain()
        assert {(await task).status_code for task in tasks} == {200}


@pytest.mark.parametrize("max_queued_requests", [1, 4])
async def test_a_request_of_more_sequences_than_an_engine_runs_is_served(
    valkey: Valkey, redis_prefix: str, max_queued_requests: int
) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=max_queued_requests) as gated:
        first = gated.send("first")
        await gated.until_started(1)
        many = gated.send("many", n=7)
        await gated.until_started(8)
        later = gated.send("later")
        await gated.until_waiting(1)
        gated.release(8)
        await gated.drain()
        assert len((await many).json()["choices"]) == 7
        assert (await first).status_code == (await later).status_code == 200


async def test_a_cancel_ends_the_wait(valkey: Valkey, redis_prefix: str) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=4) as gated:
        tasks = [gated.send(f"r{number}") for number in range(4)]
        await gated.until_started(4)
        waiting = gated.send("waiting")
        await gated.until_waiting(1)
        assert (await gated.line.client.delete("/v1/requests/waiting")).status_code == 200
        assert (await waiting).status_code == 499
        await gated.until_waiting(0)
        await gated.drain()
        assert {(await task).status_code for task in tasks} == {200}
        assert "waiting" not in gated.started


async def test_a_client_that_leaves_ends_the_wait(valkey: Valkey, redis_prefix: str) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=4) as gated:
        tasks = [gated.send(f"r{number}") for number in range(4)]
        await gated.until_started(4)
        waiting = gated.send("waiting")
        await gated.until_waiting(1)
        waiting.cancel()
        await gated.until_waiting(0)
        record = await gated.line.record_when("waiting")
        assert record["finish_reason"] == "cancelled"
        await gated.drain()
        assert {(await task).status_code for task in tasks} == {200}
        assert "waiting" not in gated.started


async def test_a_timeout_ends_the_wait_before_any_engine_work(
    valkey: Valkey, redis_prefix: str
) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=4) as gated:
        tasks = [gated.send(f"r{number}") for number in range(4)]
        await gated.until_started(4)
        late = await gated.send("late", timeout=0.2)
        assert late.status_code == 408
        error = late.json()["error"]
        assert (error["code"], error["param"]) == ("timeout", "timeout")
        await gated.until_waiting(0)
        await gated.drain()
        assert {(await task).status_code for task in tasks} == {200}
        assert "late" not in gated.started


async def test_who_cannot_start_in_time_is_told_so_at_once(
    valkey: Valkey, redis_prefix: str
) -> None:
    async with gated_line(valkey, redis_prefix, max_queued_requests=40) as gated:
        script, gated.line.detok.script = gated.line.detok.script, LONG
        assert (await gated.send("measured")).status_code == 200
        gated.line.detok.script = script
        tasks = [gated.send(f"r{number}") for number in range(12)]
        await gated.until_waiting(8)
        began = time.monotonic()
        late = await gated.send("late", timeout=20)
        assert late.status_code == 408
        assert "would wait about" in late.json()["error"]["message"]
        assert time.monotonic() - began < 20
        await gated.drain()
        assert {(await task).status_code for task in tasks} == {200}
