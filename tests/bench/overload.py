"""Overload: ten times what the line can serve. Who is served keeps its latency; the rest get 429.

A closed loop, as many clients as the engine runs at once, gives the latency at capacity and the
requests per second. Then an open loop sends ten times as many per second, each client on its own
connection. Some of those that are refused come again when Retry-After says; the rest go away.
Exits with 1 where the served take over twice their time at capacity, or promises are not kept.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from compose.directories import models_directory
from compose.model_store import DEFAULT_MODEL, ModelStore
from protos.wire.model_files import model_name
from tests.bench.lines import start_real_line, start_scripted_line
from tests.bench.processes import Processes

CONSOLE = Console()
PROMPT_TOKENS = 8
# Times the latency at capacity, median to median and p99 to p99.
MAX_SLOWDOWN = 2.0
# Of the refused who come again when told, those who are served then.
MIN_KEPT_SHARE = 0.95
# Nobody waits longer for what was promised once the load is over.
MAX_WAIT_SECONDS = 120.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")
_RETRY_AFTER = re.compile(rb"\r\nretry-after: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """`retry_after_seconds` is 0 where nothing was said."""

    status: int
    seconds: float
    retry_after_seconds: int = 0


@dataclass(slots=True)
class Obedience:
    """What became of the refused clients that came again when they were told to."""

    num_refused: int = 0
    num_served_at_once: int = 0
    num_served: int = 0
    waits: list[int] | None = None


def add_command(commands: Any) -> None:
    parser = commands.add_parser("overload", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL.name, help="for its tokenizer")
    parser.add_argument("--real", action="store_true", help="the real engine, not a scripted one")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--step-seconds", type=float, default=0.02, help="of the scripted engine")
    parser.add_argument("--max-tokens", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--factor", type=float, default=10.0, help="times the capacity")
    parser.add_argument("--obedient", type=float, default=0.1, help="share that comes again")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    model = ModelStore(models_directory(), CONSOLE).resolve(arguments.model)
    with (
        tempfile.TemporaryDirectory(prefix="tokenline-bench-") as directory,
        Processes(Path(directory) / "log") as processes,
    ):
        if arguments.real:
            port = start_real_line(processes, model, arguments.max_num_seqs)
        else:
            port = start_scripted_line(
                processes,
                model,
                arguments.max_tokens,
                arguments.max_num_seqs,
                step_seconds=arguments.step_seconds,
            )
        body = {"model": model_name(model), "max_tokens": arguments.max_tokens, "ignore_eos": True}
        asyncio.run(_measure(Load(port, body), arguments))


class Load:
    """Sends requests to 127.0.0.1:`port`/v1/completions, each with a prompt of its own."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self._port = port
        self._body = body
        self._random = random.Random(1)

    def payload(self) -> bytes:
        prompt = [self._random.randrange(300, 8000) for _ in range(PROMPT_TOKENS)]
        body = json.dumps({**self._body, "prompt": prompt}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def ask(self, payload: bytes) -> Answer:
        """Raises OSError when there is no answer."""
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(payload)
            answer = await reader.read(-1)
        finally:
            writer.close()
        status = _STATUS.match(answer)
        if status is None:
            raise ConnectionError(f"no answer but {answer[:100]!r}")
        retry_after = _RETRY_AFTER.search(answer)
        seconds = time.perf_counter() - started
        return Answer(int(status[1]), seconds, int(retry_after[1]) if retry_after else 0)

    async def closed_loop(self, num_clients: int, rounds: int) -> list[Answer]:
        async def client() -> list[Answer]:
            return [await self.ask(self.payload()) for _ in range(rounds)]

        answers = await asyncio.gather(*(client() for _ in range(num_clients)))
        return [answer for some in answers for answer in some]

    async def open_loop(
        self, per_second: float, seconds: float, obedient_share: float
    ) -> tuple[list[Answer], Obedience]:
        """The first answer of each client, and what obedience brought."""
        obedience = Obedience(waits=[])
        clients: list[asyncio.Task[Answer]] = []
        began = time.perf_counter()
        for number in range(int(per_second * seconds)):
            due = began + number / per_second
            if (pause := due - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            obeys = self._random.random() < obedient_share
            clients.append(asyncio.create_task(self._client(obedience if obeys else None)))
        return list(await asyncio.gather(*clients)), obedience

    async def _client(self, obedience: Obedience | None) -> Answer:
        payload = self.payload()
        first = answer = await self.ask(payload)
        if first.status != 429 or obedience is None:
            return first
        assert obedience.waits is not None
        obedience.num_refused += 1
        obedience.waits.append(first.retry_after_seconds)
        waited, num_tries = 0.0, 0
        while answer.status == 429 and waited + answer.retry_after_seconds <= MAX_WAIT_SECONDS:
            await asyncio.sleep(answer.retry_after_seconds)
            waited += answer.retry_after_seconds
            num_tries += 1
            answer = await self.ask(payload)
        if answer.status == 200:
            obedience.num_served += 1
            obedience.num_served_at_once += num_tries == 1
        return first


async def _measure(load: Load, arguments: argparse.Namespace) -> None:
    await load.closed_loop(arguments.max_num_seqs, 1)
    began = time.perf_counter()
    answers = await load.closed_loop(arguments.max_num_seqs, 5)
    per_second = len(answers) / (time.perf_counter() - began)
    capacity = [answer.seconds for answer in answers]
    assert all(answer.status == 200 for answer in answers)
    first, obedience = await load.open_loop(
        per_second * arguments.factor, arguments.seconds, arguments.obedient
    )
    if {200, 429} <= {answer.status for answer in first}:
        _print(arguments, capacity, per_second, first, obedience)
    faults = _faults(capacity, first, obedience)
    for fault in faults:
        CONSOLE.print(f"[red]{fault}[/red]")
    if faults:
        raise SystemExit(1)


def _faults(capacity: list[float], first: list[Answer], obedience: Obedience) -> list[str]:
    """What does not hold, in sentences."""
    served = [answer.seconds for answer in first if answer.status == 200]
    refused = [answer for answer in first if answer.status == 429]
    faults = []
    if len(served) + len(refused) < len(first):
        faults.append("some answers were neither 200 nor 429")
    if not served or not refused or not obedience.num_refused:
        return [*faults, "this was no overload: nobody was served, or nobody was refused"]
    if statistics.median(served) > MAX_SLOWDOWN * statistics.median(capacity):
        faults.append(f"the median of the served is over {MAX_SLOWDOWN:g} times that at capacity")
    if _p99(served) > MAX_SLOWDOWN * _p99(capacity):
        faults.append(f"the p99 of the served is over {MAX_SLOWDOWN:g} times that at capacity")
    if any(not answer.retry_after_seconds for answer in refused):
        faults.append("a 429 did not say when to come again")
    if obedience.num_served_at_once < MIN_KEPT_SHARE * obedience.num_refused:
        faults.append(f"under {MIN_KEPT_SHARE:.0%} of those who came when told were served then")
    return faults


def _print(
    arguments: argparse.Namespace,
    capacity: list[float],
    per_second: float,
    first: list[Answer],
    obedience: Obedience,
) -> None:
    served = sorted(answer.seconds for answer in first if answer.status == 200)
    refused = sorted(answer.seconds for answer in first if answer.status == 429)
    others = len(first) - len(served) - len(refused)
    median, p99 = statistics.median(capacity), _p99(capacity)
    table = Table(title=f"{arguments.factor:g} times the capacity for {arguments.seconds:g} s")
    table.add_column("")
    table.add_column("", justify="right")
    for name, text in (
        ("capacity, requests/s", f"{per_second:.1f}"),
        ("latency at capacity, median / p99", f"{median:.2f} / {p99:.2f} s"),
        ("sent", f"{len(first)}"),
        ("served at the first try", f"{len(served)} ({len(served) / len(first):.1%})"),
        ("their latency, median", f"{statistics.median(served) / median:.2f} times the median"),
        ("their latency, p99", f"{_p99(served) / median:.2f} times the median, "
         f"{_p99(served) / p99:.2f} times the p99"),
        ("refused with 429", f"{len(refused)} ({len(refused) / len(first):.1%})"),
        ("a refusal took, median / p99", f"{statistics.median(refused) * 1e3:.0f} / "
         f"{_p99(refused) * 1e3:.0f} ms"),
        ("anything else", f"{others}"),
        ("refused, and came again when told", f"{obedience.num_refused}"),
        ("… told to wait, median / longest", f"{statistics.median(obedience.waits or [0]):.0f} / "
         f"{max(obedience.waits or [0])} s"),
        ("… served then", _share(obedience.num_served_at_once, obedience.num_refused)),
        ("… served in the end", _share(obedience.num_served, obedience.num_refused)),
    ):  # fmt: skip
        table.add_row(name, text)
    CONSOLE.print(table)


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.1%})" if whole else "0"
