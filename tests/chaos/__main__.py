"""Hurts a running line in every way and compares what clients get: `python -m tests.chaos`."""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from protos.wire.model_files import model_name
from tests.chaos.aborts import run_aborts
from tests.chaos.cancel_latency import measure_cancels
from tests.chaos.faults import FAULTS
from tests.chaos.fencing import Fencing
from tests.chaos.line import SERVICES, LineOptions, chaos_line
from tests.chaos.model import write_chaos_model
from tests.chaos.report import Table
from tests.chaos.rounds import Rounds, run_faults
from tests.chaos.workload import make_workload

_FEW_BLOCKS: Final = ("--kv-memory", "16MiB")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=10, help="of each service and fault")
    parser.add_argument("--streams", type=int, default=64, help="of each round")
    parser.add_argument("--services", default=",".join(SERVICES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--replicas", type=int, default=2, help="of engine, detok, tokenizer")
    parser.add_argument("--requests", type=int, default=10_000, help="that are given up")
    parser.add_argument("--cancels", type=int, default=150, help="that are timed, in each way")
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--model", type=Path, help="instead of a small random one")
    parser.add_argument("--logs", type=Path, help="directory of the processes' output")
    parsed = parser.parse_args(arguments)
    parsed.services = _listed(parser, parsed.services, SERVICES)
    parsed.faults = _listed(parser, parsed.faults, tuple(FAULTS))
    return parsed


def _listed(parser: argparse.ArgumentParser, text: str, known: Sequence[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not set(names) <= set(known):
        parser.error(f"expected some of {', '.join(known)}, got {text}")
    return names


def say(line: str) -> None:
    print(line, flush=True)


async def faults_part(options: argparse.Namespace, line_options: LineOptions) -> list[Table]:
    async with chaos_line(line_options) as line:
        workload = make_workload(model_name(line_options.model), options.streams, options.seed)
        rounds = Rounds(line, workload, options.seed)
        started = time.monotonic()
        await rounds.prepare()
        say(f"reference: {time.monotonic() - started:.1f} s")
        cells = [("engine", "none")] + [
            (service, fault) for service in options.services for fault in options.faults
        ]
        return [await run_faults(rounds, cells, options.rounds, say)]


async def aborts_part(options: argparse.Namespace, line_options: LineOptions) -> list[Table]:
    model = model_name(line_options.model)
    # Few blocks, so that all of their memory has been touched before it is measured.
    few_blocks = replace(line_options, engine_arguments=("--num-threads", "1", *_FEW_BLOCKS))
    async with chaos_line(few_blocks) as line:
        left = await run_aborts(line, model, options.requests, options.seed, say)
        return [left, await measure_cancels(line, model, options.cancels)]


async def fencing_part(options: argparse.Namespace, line_options: LineOptions) -> list[Table]:
    async with chaos_line(line_options) as line:
        fencing = Fencing(line, model_name(line_options.model), options.seed)
        return [await fencing.run(options.rounds, say)]


async def run(options: argparse.Namespace, directory: Path) -> bool:
    model = options.model or write_chaos_model(directory / "chaos-model", options.seed)
    line_options = LineOptions(
        model,
        options.logs or directory / "run",
        ("--num-threads", "1", "--kv-memory", "128MiB"),
        ("--ping-seconds", "0.5", "--tool-call-format", "hermes", "--record-ttl-seconds", "30"),
        options.replicas,
    )
    tables: list[tuple[str, Table]] = []
    for name in PARTS if options.only == "all" else (options.only,):
        say(f"--- {name}")
        tables += [(name, table) for table in await PARTS[name](options, line_options)]
    for name, table in tables:
        say(f"\n=== {name}\n{table}")
    return all(table.is_good for _, table in tables)


PARTS: Final[dict[str, Callable[[argparse.Namespace, LineOptions], Awaitable[list[Table]]]]] = {
    "faults": faults_part,
    "aborts": aborts_part,
    "fencing": fencing_part,
}


async def run_until_signal(options: argparse.Namespace, directory: Path) -> bool:
    """SIGTERM ends it as Ctrl-C does: by way of every `finally`."""
    task = asyncio.ensure_future(run(options, directory))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


def main() -> None:
    options = parse(sys.argv[1:])
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, suppress(asyncio.CancelledError):
        is_good = asyncio.run(run_until_signal(options, Path(directory)))
        say(f"{'all well' if is_good else 'FAILED'} after {time.monotonic() - started:.0f} s")
        sys.exit(not is_good)
    sys.exit(130)


if __name__ == "__main__":
    main()
