"""Attention of the native CPU library, against the limits of this machine.

Each workload runs over as many layers as a model has, each with a cache of its own. The limits are
taken in the same run on as many threads: reading memory, and fused multiply-adds on registers.
"""

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kernels.cpu import build, library
from kernels.cpu.library import runnable
from tests.bench.kernels import aligned_bytes, best_rate, load_limits, read_rate

KINDS = {"float16": 0, "float32": 1, "int8": 2}
BLOCK_SIZE = 16
NUM_LAYERS = 30
MOST_CACHE_BYTES = 1 << 30
FMA_ROUNDS = 1 << 16


@dataclass(frozen=True)
class Workload:
    """Sequences of equal length, of which the last tokens are queries."""

    name: str
    num_sequences: int
    num_queries: int
    length: int


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


WORKLOADS = (
    Workload("decode, 100 tokens", 1, 1, 100),
    Workload("decode, 300 tokens", 1, 1, 300),
    Workload("decode, 1024 tokens", 1, 1, 1024),
    Workload("decode, 4096 tokens", 1, 1, 4096),
    Workload("16 decode, 1024 tokens", 16, 1, 1024),
    Workload("64 decode, 200 tokens", 64, 1, 200),
    Workload("5 drafts, 2048 tokens", 1, 5, 2048),
    Workload("prefill 512", 1, 512, 512),
    Workload("prefill 4096", 1, 4096, 4096),
    Workload("last 64 of 4096", 1, 64, 4096),
)


def add_command(commands: Any) -> None:
    parser = commands.add_parser("attention", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument("--builds", default="", help="such as avx2,avx512 (all that run here)")
    parser.add_argument("--kinds", default="float16,int8", help=", ".join(KINDS))
    parser.add_argument("--only", default="", help="workloads whose names hold this")
    parser.add_argument("--shapes", default="9/3x64", help="heads/KV heads x head dimension, …")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    console = Console()
    shapes = [
        Shape(*map(int, text.replace("x", "/").split("/"))) for text in arguments.shapes.split(",")
    ]
    for name in arguments.builds.split(",") if arguments.builds else runnable():
        bench = Bench(name, arguments.threads, arguments.seconds)
        table = Table(
            "workload", "heads", "KV", "µs a layer", "GB/s", "of limit", "GFLOP/s", "of limit"
        )
        for shape in shapes:
            for kind in arguments.kinds.split(","):
                for workload in WORKLOADS:
                    if arguments.only in workload.name:
                        table.add_row(*bench.row(workload, shape, kind))
        console.print(f"{name}, {arguments.threads} threads: {bench}")
        console.print(table)


class Bench:
    """One build, and the limits for it."""

    def __init__(self, name: str, num_threads: int, seconds: float) -> None:
        self._library, self._num_threads, self._seconds = library.load(name), num_threads, seconds
        limits, fma = load_limits(name), _load_fma_limit(name)
        self._bytes_per_second = read_rate(limits, num_threads, 2 * seconds)
        self._operations_per_second = best_rate(
            lambda _: float(fma.tl_limit_fma(FMA_ROUNDS)), num_threads, seconds
        )

    def __str__(self) -> str:
        return (
            f"memory {self._bytes_per_second / 1e9:.1f} GB/s, "
            f"fma {self._operations_per_second / 1e9:.0f} GFLOP/s"
        )

    def row(self, workload: Workload, shape: Shape, kind: str) -> Sequence[str]:
        """Times one workload; the row of the table for it."""
        seconds, num_bytes = self._time(workload, shape, KINDS[kind])
        queries, length = workload.num_queries, workload.length
        seen = queries * (length - queries) + queries * (queries + 1) // 2
        operations = 4.0 * seen * workload.num_sequences * shape.heads * shape.head_dim
        return (
            workload.name,
            str(shape),
            kind,
            f"{seconds * 1e6:.1f}",
            f"{num_bytes / seconds / 1e9:.1f}",
            f"{100 * num_bytes / seconds / self._bytes_per_second:.0f} %",
            f"{operations / seconds / 1e9:.1f}",
            f"{100 * operations / seconds / self._operations_per_second:.0f} %",
        )

    def _time(self, workload: Workload, shape: Shape, kind: int) -> tuple[float, int]:
        """Seconds for one layer, of the fastest run over all, and the bytes of its cache."""
        native, sizes = self._library, (shape.kv_heads, shape.head_dim)
        blocks = -(-workload.length // BLOCK_SIZE) * workload.num_sequences
        layer_bytes = blocks * native.tl_kv_block_bytes(kind, BLOCK_SIZE, *sizes)
        num_layers = max(1, min(NUM_LAYERS, MOST_CACHE_BYTES // layer_bytes))
        # Small normal numbers as any type: what they are costs nothing.
        caches = aligned_bytes(num_layers * layer_bytes).reshape(num_layers, layer_bytes)
        caches[:] = 0x3C if kind != KINDS["float16"] else 0x2C
        random = np.random.default_rng(0)
        table = random.permutation(blocks).astype(np.int32).reshape(workload.num_sequences, -1)
        num_tokens = workload.num_sequences * workload.num_queries
        width = shape.heads * shape.head_dim
        query, out = random.standard_normal((2, num_tokens, width), np.float32)
        cu_seqlens = np.arange(workload.num_sequences + 1, dtype=np.int32) * workload.num_queries
        seq_lens = np.full(workload.num_sequences, workload.length, np.int32)
        program = native.tl_program_new()
        plan = native.tl_add_attention_plan(
            *(program, 2, cu_seqlens.ctypes.data, seq_lens.ctypes.data, table.ctypes.data),
            *(table.shape[1], None, BLOCK_SIZE),
        )
        for cache in caches:
            layer = library.KvLayer(cache.ctypes.data, kind, BLOCK_SIZE, *sizes)
            native.tl_add_attention(
                *(program, 0, plan, query.ctypes.data, width, shape.heads, layer, 0.125, 0),
                library.Rows(out.ctypes.data, width),
            )
        counts = (ctypes.c_int64 * 4)(num_tokens, 0, workload.num_sequences)
        pool = native.tl_pool_new(self._num_threads)
        best, deadline, runs = float("inf"), time.perf_counter() + self._seconds, 0
        while runs < 3 or time.perf_counter() < deadline:
            started = time.perf_counter()
            native.tl_program_run(program, pool, counts)
            best = min(best, time.perf_counter() - started)
            runs += 1
        native.tl_program_delete(program)
        native.tl_pool_delete(pool)
        return best / num_layers, layer_bytes


def _load_fma_limit(name: str) -> ctypes.CDLL:
    source = Path(__file__).with_name("attention_limits.cpp")
    with tempfile.TemporaryDirectory() as directory:
        target = str(Path(directory) / "limits.so")
        flags = (*build.FLAGS, *build.instruction_sets()[name].flags, "-I", str(build.SOURCES))
        command = [*build.find_compiler(), *flags, "-shared", str(source), "-o", target]
        subprocess.run(command, check=True, timeout=120)
        limit = ctypes.CDLL(target)
    limit.tl_limit_fma.argtypes = [ctypes.c_int64]
    limit.tl_limit_fma.restype = ctypes.c_double
    return limit
