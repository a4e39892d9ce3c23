"""Sampling alone: rows per second of the native builds beside torch's, and Python's share of it.

Logits are like a model's: few likely tokens and a long tail, or normal, where filters keep
thousands. All implementations take turns, and the best of their turns counts.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine_svc.compute.sampler import Sampler
from engine_svc.compute.sampling_rows import SamplingRows
from engine_svc.planning.step import SamplingParameters
from kernels.cpu.backend import CpuKernels
from kernels.cpu.library import runnable
from tests.fakes.native_ops import open_sampling

CONSOLE = Console()
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "5 logprobs": {"temperature": 0.0, "logprobs": True, "top_logprobs": 5},
}
# Few enough for all turns of torch, which takes up to 20 ms a row, to end soon.
NUM_TURNS = 7
SECONDS_PER_TURN = 0.02


def add_command(commands: Any) -> None:
    parser = commands.add_parser("sampling", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode(), ExitStack() as stack:
        samplers = {"torch": Sampler(CpuKernels())}
        for name in runnable():
            kernels = stack.enter_context(open_sampling(name, arguments.threads))
            samplers[name] = Sampler(kernels)
        for vocab_size in arguments.vocab_size:
            for kind, make in (("a model's", _like_a_model), ("normal", torch.randn)):
                title = f"{arguments.rows} rows of {vocab_size}, {kind} logits"
                logits = make(arguments.rows, vocab_size)
                CONSOLE.print(_table(title, samplers, logits))
        for name, sampler in samplers.items():
            CONSOLE.print(f"{name}: {_python_share(sampler)}")


def _table(title: str, samplers: dict[str, Sampler], logits: Tensor) -> Table:
    table = Table("", *(f"{name}, rows/s" for name in samplers), "times torch", title=title)
    for option, values in OPTIONS.items():
        step = _step(logits, SamplingParameters(max_tokens=1, **values))
        seconds = _best_seconds({name: step(sampler) for name, sampler in samplers.items()})
        rates = [len(logits) / seconds[name] for name in samplers]
        ratio = max(rates) / rates[0]
        table.add_row(option, *(f"{rate:,.0f}" for rate in rates), f"{ratio:,.0f}")
    return table


def _step(
    logits: Tensor, sampling: SamplingParameters
) -> Callable[[Sampler], Callable[[], object]]:
    num_rows, vocab_size = logits.shape
    rows = SamplingRows(np.zeros((num_rows, 8), np.int32), np.full(num_rows, 4), vocab_size)
    for row in range(num_rows):
        rows.start(row, sampling)
    inputs = rows.gather(np.arange(num_rows), np.full(num_rows, 5))
    return lambda sampler: lambda: sampler.sample(logits, inputs)


def _best_seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(NUM_TURNS):
        for name, call in calls.items():
            end = time.perf_counter() + SECONDS_PER_TURN
            while (before := time.perf_counter()) < end:
                call()
                best[name] = min(best[name], time.perf_counter() - before)
    return best


def _python_share(sampler: Sampler) -> str:
    """Of a step whose rows have hardly any logits."""
    shares = []
    for num_rows in (1, 64):
        step = _step(torch.randn(num_rows, 16), SamplingParameters(max_tokens=1))
        seconds = _best_seconds({"": step(sampler)})[""]
        shares.append(f"{num_rows} rows {seconds * 1e6:.1f} µs")
    return "a step of rows of 16 logits: " + ", ".join(shares)


def _like_a_model(num_rows: int, vocab_size: int) -> Tensor:
    ranks = torch.stack([torch.randperm(vocab_size) for _ in range(num_rows)]).float() + 1
    return -1.7 * ranks.log() + 0.5 * torch.randn(num_rows, vocab_size)
