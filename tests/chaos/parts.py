"""The parts of a chaos run, one for each point that it must show, and what each is given."""

import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from protos.wire.model_files import model_name
from tests.chaos.aborts import run_aborts
from tests.chaos.cancel_latency import measure_cancels
from tests.chaos.faults import RANK_FAULTS
from tests.chaos.fencing import Fencing
from tests.chaos.line import LineOptions, chaos_line
from tests.chaos.outside import run_program
from tests.chaos.report import Table
from tests.chaos.rounds import ROLLING, Rounds, run_faults
from tests.chaos.workload import make_workload

ENGINE_ARGUMENTS: Final = ("--num-threads", "1", "--kv-memory", "128MiB")
GATEWAY_ARGUMENTS: Final = (
    # Clients take two silent seconds for the end of a connection.
    *("--ping-seconds", "0.5"),
    *("--tool-call-format", "hermes"),
    # Redis comes to its steady size within the run.
    *("--record-ttl-seconds", "30"),
)
# Few blocks and small steps: what the KV cache and the matrix products' own cache, which keeps
# a program per number of rows, may hold, they hold before memory is measured.
_SMALL_ENGINE: Final = (
    *("--num-threads", "1", "--kv-memory", "16MiB"),
    *("--max-num-batched-tokens", "64"),
)
# Engines of two ranks each. What computes them is slower, so a step hangs later than it takes.
_PARALLEL_ENGINE: Final = (
    *("--tensor-parallel", "2", "--device", "cpu", "--dtype", "float32"),
    *("--kv-memory", "128MiB", "--step-timeout-seconds", "5"),
)
# The short run has each service and each fault, the likely ones more than once.
_SHORT_CELLS: Final = (
    ("engine", "kill"),
    ("engine", "stop"),
    ("engine", "reset"),
    ("engine", "restart"),
    ("detok", "kill"),
    ("detok", "partition"),
    ("tokenizer", "kill"),
    ("tokenizer", "reset"),
    ("gateway", "kill"),
    ("gateway", "stop"),
    ("gateway", "restart"),
    ("gateway", "reset"),
    ("redis", "kill"),
    ("redis", "partition"),
)
_PROGRAM_SECONDS: Final = 900.0


def say(line: str) -> None:
    print(line, flush=True)


async def faults(options: Namespace, line_options: LineOptions) -> list[Table]:
    """1: every fault of every service under mixed streams."""
    # One engine has places for all while the other is away: to wait for a place is no fault.
    places = ("--max-num-seqs", str(3 * options.streams))
    async with chaos_line(replace(line_options, engine_arguments=places)) as line:
        workload = make_workload(model_name(line_options.model), options.streams, options.seed)
        rounds = Rounds(line, workload, options.seed, judges_time=not options.short)
        started = time.monotonic()
        await rounds.prepare()
        say(f"reference: {time.monotonic() - started:.1f} s")
        cells = [
            (service, fault)
            for service in options.services
            for fault in options.faults
            if not options.short or (service, fault) in _SHORT_CELLS
        ]
        cells = [("engine", "none"), *cells, *([] if options.short else [("every", ROLLING)])]
        return [await run_faults(rounds, cells, options.rounds, say)]


async def aborts(options: Namespace, line_options: LineOptions) -> list[Table]:
    """2: what is given up leaves nothing behind, and soon."""
    model = model_name(line_options.model)
    async with chaos_line(replace(line_options, engine_arguments=_SMALL_ENGINE)) as line:
        left = await run_aborts(
            line, model, options.requests, options.seed, say, judges_memory=not options.short
        )
        cancels = await measure_cancels(line, model, options.cancels, judges_time=not options.short)
        return [left, cancels]


async def fencing(options: Namespace, line_options: LineOptions) -> list[Table]:
    """3: two owners of one request."""
    async with chaos_line(line_options) as line:
        rounds = Fencing(line, model_name(line_options.model), options.seed)
        return [await rounds.run(options.rounds, say)]


async def ranks(options: Namespace, line_options: LineOptions) -> list[Table]:
    """6: a rank of an engine that has several."""
    arguments = (*_PARALLEL_ENGINE, "--max-num-seqs", str(3 * options.streams))
    async with chaos_line(replace(line_options, engine_arguments=arguments)) as line:
        workload = make_workload(model_name(line_options.model), options.streams, options.seed)
        rounds = Rounds(line, workload, options.seed, judges_time=False)
        await rounds.prepare()
        faults = ("kill-rank",) if options.short else ("none", *RANK_FAULTS)
        cells = [("engine", fault) for fault in faults]
        return [await run_faults(rounds, cells, options.rounds, say)]


async def hostile(options: Namespace, line_options: LineOptions) -> list[Table]:
    """4: malformed, truncated and oversized requests, on a line of their own."""
    return [await run_program("hostile", ("tests.hostile",), _PROGRAM_SECONDS, say)]


async def overload(options: Namespace, line_options: LineOptions) -> list[Table]:
    """5: ten times more than the line can do."""
    return [await run_program("overload", ("tests.bench", "overload"), _PROGRAM_SECONDS, say)]


PARTS: Final[dict[str, Callable[[Namespace, LineOptions], Awaitable[list[Table]]]]] = {
    "faults": faults,
    "aborts": aborts,
    "fencing": fencing,
    "hostile": hostile,
    "overload": overload,
    "ranks": ranks,
}
SHORT_PARTS: Final = ("faults", "fencing", "aborts")
