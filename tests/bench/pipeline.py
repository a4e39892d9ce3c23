"""What the line around an engine costs: through HTTP against the same engine driven in-process.

Part 1, a real engine: 16 concurrent streams through HTTP, as a ratio of the same engine in one
process of its own without the line; the two alternate. Part 2, a scripted engine that emits as fast
as it is read: what gateway and detok carry, and the CPU each process spends per token.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from compose.directories import models_directory
from compose.model_store import DEFAULT_MODEL, ModelStore
from protos.wire.model_files import model_name
from tests.bench.http_load import LoadResult, run_load
from tests.bench.in_process import InProcessEngine
from tests.bench.lines import start_real_line, start_scripted_line
from tests.bench.processes import Processes

CONSOLE = Console()
PROMPT_TOKENS = 32


def add_command(commands: Any) -> None:
    parser = commands.add_parser("pipeline", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL.name, help="a name, GGUF file or HF directory"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16, help="of the real engine")
    parser.add_argument("--max-tokens", type=int, default=64, help="per stream of the real engine")
    parser.add_argument("--scripted-streams", type=int, default=256)
    parser.add_argument("--scripted-max-tokens", type=int, default=400)
    parser.add_argument("--skip-real", action="store_true", help="only the scripted engine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    model = ModelStore(models_directory(), CONSOLE).resolve(arguments.model)
    with tempfile.TemporaryDirectory(prefix="tokenline-bench-") as directory:
        if not arguments.skip_real:
            bench_real(arguments, model, Path(directory) / "real.log")
        bench_scripted(arguments, model, Path(directory) / "scripted.log")


def bench_real(arguments: argparse.Namespace, model: Path, log_path: Path) -> None:
    """Prints the ratio of HTTP to in-process tokens/s, round by round."""
    streams, max_tokens = arguments.streams, arguments.max_tokens
    generator = random.Random(1)
    ratios = []
    with (
        Processes(log_path) as processes,
        InProcessEngine(model, max_num_seqs=streams) as in_process,
    ):
        port = start_real_line(processes, model, streams)
        for number in range(arguments.rounds + 1):
            alone = in_process.run(_random_prompts(generator, streams), max_tokens)
            before = processes.cpu_seconds()
            bodies = [
                {**body, "model": model_name(model)}
                for body in _real_bodies(generator, streams, max_tokens)
            ]
            load = _load(port, bodies, streams)
            cpu = _cpu_per_token(before, processes.cpu_seconds(), load.num_tokens)
            if number == 0:
                continue  # warm-up
            ratios.append(load.tokens_per_second / alone)
            CONSOLE.print(
                f"round {number}: in-process {alone:7.1f} tokens/s, through HTTP "
                f"{load.tokens_per_second:7.1f} tokens/s, ratio {ratios[-1]:.3f}"
            )
        CONSOLE.print(_cpu_table("CPU per token, real engine", cpu))
    CONSOLE.print(
        f"[bold]{streams} streams through HTTP / in-process: median ratio "
        f"{statistics.median(ratios):.3f}[/bold] (goal: at least 0.9)"
    )


def bench_scripted(arguments: argparse.Namespace, model: Path, log_path: Path) -> None:
    """Prints what gateway and detok carry, and CPU per token of each process."""
    streams, max_tokens = arguments.scripted_streams, arguments.scripted_max_tokens
    rates = []
    with Processes(log_path) as processes:
        port = start_scripted_line(processes, model, max_tokens, streams)
        bodies = [{"model": model_name(model), "prompt": "Hello", "max_tokens": max_tokens}]
        for number in range(arguments.rounds + 1):
            before = processes.cpu_seconds()
            load = _load(port, bodies * streams, streams)
            cpu = _cpu_per_token(before, processes.cpu_seconds(), load.num_tokens)
            if load.num_tokens != streams * max_tokens:
                raise RuntimeError(f"expected {streams * max_tokens} tokens, got {load.num_tokens}")
            if number == 0:
                continue  # warm-up
            rates.append(load.tokens_per_second)
            reads = sum(stream.num_reads for stream in load.streams) / load.num_tokens
            CONSOLE.print(
                f"round {number}: {load.tokens_per_second:9.0f} tokens/s, "
                f"{reads:.2f} reads per token at the client"
            )
        CONSOLE.print(_cpu_table("CPU per token, scripted engine", cpu))
        CONSOLE.print(
            "resident memory, MiB: "
            + ", ".join(f"{k} {v:.0f}" for k, v in processes.resident_mib().items())
        )
    CONSOLE.print(
        f"[bold]gateway + detok at {streams} streams: median "
        f"{statistics.median(rates):.0f} tokens/s[/bold] (goal: at least 15000)"
    )


def _random_prompts(generator: random.Random, count: int) -> list[list[int]]:
    """Random ids, so that no prefix cache helps; low ids exist in every vocabulary."""
    return [[generator.randrange(300, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _real_bodies(generator: random.Random, count: int, max_tokens: int) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        for prompt in _random_prompts(generator, count)
    ]


def _load(port: int, bodies: list[dict[str, Any]], concurrency: int) -> LoadResult:
    return asyncio.run(run_load(port, bodies, concurrency))


def _cpu_per_token(
    before: dict[str, float], after: dict[str, float], num_tokens: int
) -> dict[str, float]:
    return {name: (after[name] - before[name]) / num_tokens * 1e6 for name in after}


def _cpu_table(title: str, microseconds: dict[str, float]) -> Table:
    table = Table(title=title)
    table.add_column("process")
    table.add_column("µs per token", justify="right")
    for name, value in microseconds.items():
        table.add_row(name, f"{value:.1f}")
    return table
