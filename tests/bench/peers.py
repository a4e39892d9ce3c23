"""Speed beside other servers: the same requests through HTTP, turn by turn, as ratios.

For each workload every server is started anew for it on loopback, then they take turns (A B A B),
and the figure is the median of the ratios within a round. A round in which other programs took over
4 % of the CPU does not count. llama-server serves the same file, and further ones if given; any
other server with an OpenAI-compatible API is given by its command. What is not there is left out.
With --check the exit code is 1 where a goal is missed.
"""

import argparse
import os
import random
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from compose.directories import models_directory
from compose.model_store import DEFAULT_MODEL, ModelStore
from tests.bench.machine import measure_limits
from tests.bench.only_avx2 import only_avx2
from tests.bench.peers_quiet import OthersWatch
from tests.bench.peers_report import (
    Outcome,
    Round,
    Work,
    goals_table,
    limits_table,
    memory_table,
    results_table,
)
from tests.bench.peers_servers import (
    OURS,
    Contestant,
    Running,
    Shape,
    llama_server,
    other_server,
    ours,
    running,
)
from tests.bench.peers_workloads import Workload, workloads

CONSOLE = Console(width=None if os.isatty(1) else 160)
LLAMA_SERVER_VARIABLE = "TOKENLINE_BENCH_LLAMA_SERVER"
LLAMA_MODELS_VARIABLE = "TOKENLINE_BENCH_LLAMA_MODELS"
# How often a round may be repeated because others took too much of the machine.
MAX_LOUD_ROUNDS = 3


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "peers",
        help=__doc__.splitlines()[0],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [workload.name for workload in workloads()]
    parser.add_argument("--model", default=DEFAULT_MODEL.name, help="the file that all serve")
    parser.add_argument(
        "--llama-server",
        default=os.environ.get(LLAMA_SERVER_VARIABLE, "llama-server"),
        help=f"the program; else ${LLAMA_SERVER_VARIABLE}, else from the PATH",
    )
    parser.add_argument(
        "--llama-model",
        action="append",
        type=Path,
        default=[Path(p) for p in os.environ.get(LLAMA_MODELS_VARIABLE, "").split(":") if p],
        help=f"a further file for llama-server, any number; also ${LLAMA_MODELS_VARIABLE}, by ':'",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another server; {port}, {threads}, {streams}, {context} and {python} are filled in",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5, help="that count, for each workload")
    parser.add_argument("--workloads", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument(
        "--engine-flags",
        default="--speculation off",
        help="for our engine. By default it guesses nothing ahead: on random words a model soon "
        "repeats itself, which guesses would make much of",
    )
    parser.add_argument(
        "--only-avx2",
        action="store_true",
        help="hides from all of them, ours too, what the CPU has beyond AVX2 (Linux on x86-64). "
        "llama-server, which is compiled for a CPU, must then be one for AVX2",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    model = ModelStore(models_directory(), CONSOLE).resolve(arguments.model)
    known = {workload.name: workload for workload in workloads()}
    chosen = arguments.workloads.split(",")
    if unknown := set(chosen) - known.keys():
        raise SystemExit(f"unknown workloads: {', '.join(sorted(unknown))}")
    contestants = find_contestants(arguments, model)
    names = [contestant.name for contestant in contestants]
    architecture = "x86-64-v3" if arguments.only_avx2 else "native"
    limits = measure_limits(arguments.threads, architecture)
    CONSOLE.print(f"the machine, {limits}")
    with tempfile.TemporaryDirectory(prefix="tokenline-bench-") as temporary:
        directory = Path(temporary)
        environment = _held_to_avx2(directory) if arguments.only_avx2 else {}
        outcomes = [
            take_turns(known[name], contestants, arguments, directory, environment)
            for name in chosen
        ]
    limits = limits.best_of(measure_limits(arguments.threads, architecture))
    CONSOLE.print(results_table(outcomes, names))
    for outcome in outcomes:
        if outcome.figure.name == "streams16":
            CONSOLE.print(memory_table(outcome))
    if (work := Work.of(model)) is not None:
        CONSOLE.print(limits_table(outcomes, names, work, limits))
    missed = ["no peer is there to compare with"]
    if len(contestants) > 1:
        same_file = next((one.name for one in contestants[1:] if one.same_file), None)
        table, missed = goals_table(outcomes, same_file)
        CONSOLE.print(table)
    if missed and arguments.check:
        raise SystemExit("\n".join(missed))


def _held_to_avx2(directory: Path) -> Mapping[str, str]:
    try:
        return only_avx2(directory)
    except RuntimeError as error:
        raise SystemExit(
            f"{error}\nleave out --only-avx2 to compare with all that it has"
        ) from error


def find_contestants(arguments: argparse.Namespace, model: Path) -> list[Contestant]:
    """Ours first; says which others are left out, and why."""
    found = [ours(model, shlex.split(arguments.engine_flags))]
    program = shutil.which(arguments.llama_server)
    if program is None:
        CONSOLE.print(f"left out: llama-server, since there is no {arguments.llama_server}")
    elif model.is_dir():
        CONSOLE.print("left out: llama-server, which reads GGUF files only")
    else:
        found.append(llama_server(program, model, "llama-server", same_file=True))
    for path in arguments.llama_model if program is not None else ():
        if path.exists():
            name = f"llama-server {path.name.removesuffix('.gguf').rpartition('.')[2]}"
            found.append(llama_server(program, path, name, same_file=False))
        else:
            CONSOLE.print(f"left out: {path}, which does not exist")
    for peer in arguments.peer:
        name, _, command = peer.partition("=")
        if command and shutil.which(shlex.split(command)[0].format(python="python3")):
            found.append(other_server(name, command))
        else:
            CONSOLE.print(f"left out: {name}, whose command cannot be run")
    return found


def take_turns(
    workload: Workload,
    contestants: Sequence[Contestant],
    arguments: argparse.Namespace,
    directory: Path,
    environment: Mapping[str, str],
) -> Outcome:
    """Starts all contestants for one workload and has them take turns until enough rounds count."""
    CONSOLE.print(f"[bold]{workload.figure.title}[/]")
    shape = Shape(workload.streams, workload.context, arguments.threads)
    outcome = Outcome(workload.figure)
    with ExitStack() as stack:
        servers = []
        for one in contestants:
            log_path = directory / f"{workload.name}-{len(servers)}.log"
            servers.append(stack.enter_context(running(one, shape, log_path, environment)))
        _leave_out_failed(workload, servers)
        most = arguments.rounds + MAX_LOUD_ROUNDS
        while outcome.num_quiet < arguments.rounds and len(outcome.rounds) < most:
            number = len(outcome.rounds) + 1
            outcome.rounds.append(_turn(workload, servers, number))
            _print_round(workload, number, outcome.rounds[-1])
        outcome.memory_mib = {one.contestant.name: one.memory_mib() for one in servers}
    return outcome


def _leave_out_failed(workload: Workload, servers: list[Running]) -> None:
    """A first turn, to warm up; peers that cannot do it are left out of the workload."""
    for server in servers[:]:
        try:
            _turn(workload, [server], number=0)
        except RuntimeError as error:
            if server.contestant.name == OURS:
                raise
            CONSOLE.print(f"left out: {error}")
            servers.remove(server)


def _turn(workload: Workload, servers: Sequence[Running], number: int) -> Round:
    """Each server once, with the same requests; the loudest of them is the round's."""
    values, shares = {}, []
    for server in servers:
        watch = OthersWatch(server.cpu_seconds)
        # The same seed for each server: the same requests.
        generator = random.Random(f"{workload.name} {number}")
        try:
            value = workload.run(server.port, server.model_name, generator)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"{server.contestant.name}, {workload.name}: {error}") from error
        values[server.contestant.name] = value
        shares.append(watch.share())
    return Round(values, max(shares))


def _print_round(workload: Workload, number: int, done: Round) -> None:
    values = ", ".join(f"{name} {value:,.1f}" for name, value in done.values.items())
    ratios = ", ".join(
        f"{done.values[OURS] / value:.2f}x" for name, value in done.values.items() if name != OURS
    )
    loud = "" if done.quiet else ", [red]does not count[/]"
    CONSOLE.print(
        f"  round {number}: {values} {workload.figure.unit}{f' ({ratios})' if ratios else ''}; "
        f"others took {done.others_share:.1%}{loud}"
    )
