"""Hurts a running line in every way and compares what clients get: `python -m tests.chaos`."""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.chaos.faults import FAULTS
from tests.chaos.line import SERVICES, LineOptions
from tests.chaos.model import write_chaos_model
from tests.chaos.parts import ENGINE_ARGUMENTS, GATEWAY_ARGUMENTS, PARTS, SHORT_PARTS, say
from tests.chaos.report import Table

# What --short changes. It judges no times: it must hold on any machine, however busy.
_SHORT: Final = {"rounds": 1, "streams": 28, "requests": 400, "cancels": 15}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--short", action="store_true", help="a few minutes, part of `make test`")
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
    if "--short" in arguments:
        parser.set_defaults(**_SHORT)
    parsed = parser.parse_args(arguments)
    parsed.services = _listed(parser, parsed.services, SERVICES)
    parsed.faults = _listed(parser, parsed.faults, tuple(FAULTS))
    return parsed


def _listed(parser: argparse.ArgumentParser, text: str, known: Sequence[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not set(names) <= set(known):
        parser.error(f"expected some of {', '.join(known)}, got {text}")
    return names


async def run(options: argparse.Namespace, directory: Path) -> bool:
    """All parts that were asked for, then their tables; whether all was well."""
    model = options.model or write_chaos_model(directory / "chaos-model", options.seed)
    line_options = LineOptions(
        model,
        options.logs or directory / "run",
        ENGINE_ARGUMENTS,
        GATEWAY_ARGUMENTS,
        options.replicas,
    )
    names = [options.only]
    if options.only == "all":
        names = list(SHORT_PARTS if options.short else PARTS)
    tables: list[tuple[str, Table]] = []
    for name in names:
        say(f"--- {name}")
        tables += [(name, table) for table in await PARTS[name](options, line_options)]
    for name, table in tables:
        say(f"\n=== {name}\n{table}")
    return all(table.is_good for _, table in tables)


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
