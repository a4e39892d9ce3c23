"""Linear layers of the native CPU library, against the limits of this machine.

Every matrix is multiplied in as many copies as the caches cannot hold, as a model's layers come:
its weights are read from memory each time. The limits are taken in the same run on as many
threads: reading memory, and a linear layer's instructions on registers alone (kernel_limits.cpp),
which are a dot product of int8 for each half of the activations, unpacking of 4-bit weights once
for the rows of a tile, and for each group of 32 columns the conversion to float, scale · scale and
one fma (two with a minimum). Where rows are multiplied by AMX, so is the limit: its dot products
can only be stored, which is then a part of it. A weight times an activation counts once. Few rows
wait for memory alone; 16 and more for whichever of the two limits is nearer.
"""

import argparse
import ctypes
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kernels.cpu import build, library
from kernels.cpu.library import runnable
from kernels.cpu.native_backend import NUM_HALVES

# As api.h has them.
FORMATS = {"q4": 0, "q4-wide": 1, "q8": 2, "f16": 3, "bf16": 4, "f32": 5}
SHAPES = ((576, 576), (960, 576), (3072, 576), (576, 1536), (49152, 576))
NUM_ROWS = (1, 4, 16, 64, 512)
# Rows from which on arithmetic may be the limit.
ROWS_THAT_COMPUTE = 16
ROWS_OF_A_PROMPT = 64
# Of kernel_limits.cpp, in its order.
MIXES = ("dots alone", "q4", "q8")
COLUMNS = ("shape", "format", "rows", "µs", "GOP/s", "of limit", "GB/s", "of limit")
CACHE_BYTES = 96 << 20
MOST_OUTPUT_BYTES = 64 << 20
GROUP, PANEL_ROWS = 32, 16
# In front of each group of a panel of 4-bit weights.
SCALE_BYTES = {FORMATS["q4"]: 64, FORMATS["q4-wide"]: 128}
LIMIT_ROUNDS = 1 << 16
READ_BYTES = 256 << 20


def add_command(commands: Any) -> None:
    parser = commands.add_parser("kernels", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument("--builds", default="", help="such as avx2,avx512 (all that run here)")
    parser.add_argument("--formats", default="q4,q8", help=", ".join(FORMATS))
    parser.add_argument("--activations", choices=("int8", "int16"), default="int8")
    parser.add_argument("--rows", default=",".join(map(str, NUM_ROWS)))
    parser.add_argument("--shapes", default="", help="such as 576x576,960x576 (SmolLM2-135M's)")
    parser.add_argument("--gated", action="store_true", help="with silu(gate) · up on 3072x576")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    shapes = [
        (int(rows), int(columns))
        for rows, columns in (text.split("x") for text in arguments.shapes.split(",") if text)
    ] or list(SHAPES)
    for name in arguments.builds.split(",") if arguments.builds else runnable():
        halves = NUM_HALVES[arguments.activations]
        with Bench(name, halves, arguments.threads, arguments.seconds) as bench:
            table = Table(*COLUMNS)
            for format_name in arguments.formats.split(","):
                for rows, columns in shapes:
                    for num_rows in map(int, arguments.rows.split(",")):
                        if num_rows * rows * 4 <= MOST_OUTPUT_BYTES:
                            table.add_row(*bench.row(format_name, rows, columns, num_rows, False))
                for num_rows in map(int, arguments.rows.split(",")) if arguments.gated else ():
                    table.add_row(*bench.row(format_name, 3072, 576, num_rows, True))
            console = Console()
            console.print(f"{name}, {arguments.threads} threads: {bench}")
            console.print(table)


class Bench:
    """One build on a pool of threads, and the limits for it."""

    def __init__(self, name: str, halves: int, num_threads: int, seconds: float) -> None:
        self._library = library.load(name)
        self._halves = halves
        self._seconds = seconds
        self._num_threads = num_threads
        self._limits = load_limits(name)
        self._bytes_per_second = read_rate(self._limits, num_threads, 2 * seconds)
        self._operations_per_second: dict[tuple[str, int], float] = {}
        self._pool = self._library.tl_pool_new(num_threads)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self._library.tl_pool_delete(self._pool)

    def __str__(self) -> str:
        rate = self._limit("dots alone", ROWS_OF_A_PROMPT)
        return (
            f"memory {self._bytes_per_second / 1e9:.1f} GB/s, "
            f"dot products alone {rate / 1e9:.0f} GOP/s"
        )

    def row(
        self, format_name: str, rows: int, columns: int, num_rows: int, is_gated: bool
    ) -> list[str]:
        """Times one product; the row of the table for it."""
        num_bytes = self._library.tl_packed_bytes(FORMATS[format_name], rows, columns)
        seconds = self._time(FORMATS[format_name], rows, columns, num_rows, is_gated)
        operations = 2.0 * rows * columns * num_rows / seconds
        computes = num_rows >= ROWS_THAT_COMPUTE
        limit = self._limit(format_name.removesuffix("-wide"), num_rows) if computes else 0.0
        memory_share = 100 * num_bytes / seconds / self._bytes_per_second
        return [
            f"{'gated ' if is_gated else ''}{rows}x{columns}",
            format_name,
            str(num_rows),
            f"{seconds * 1e6:.1f}",
            f"{operations / 1e9:.0f}",
            f"{100 * operations / limit:.0f} %" if limit else "",
            f"{num_bytes / seconds / 1e9:.1f}",
            f"{memory_share:.0f} %",
        ]

    def _time(
        self, format_code: int, rows: int, columns: int, num_rows: int, is_gated: bool
    ) -> float:
        """Seconds for one matrix, of the fastest run over all its copies."""
        native = self._library
        num_bytes = native.tl_packed_bytes(format_code, rows, columns)
        num_copies = max(2, CACHE_BYTES // num_bytes)
        weights = self._pack(format_code, rows, columns, num_bytes, num_copies)
        inputs, kept = random_rows(num_rows, columns, self._halves)
        out = np.zeros((num_rows, rows), np.float32)
        gated, kept_too = (
            random_rows(num_rows, rows // 2, self._halves) if is_gated else (None, None)
        )
        program = native.tl_program_new()
        for copy in range(num_copies):
            matrix = library.Matrix(format_code, rows, columns, weights[copy].ctypes.data, None)
            if is_gated:
                native.tl_add_gated_linear(program, 0, inputs, matrix, gated)
            else:
                native.tl_add_linear(program, 0, inputs, matrix, 0, out.ctypes.data, rows)
        counts = (ctypes.c_int64 * 4)(num_rows)
        best, deadline, runs = float("inf"), time.perf_counter() + self._seconds, 0
        while runs < 3 or time.perf_counter() < deadline:
            started = time.perf_counter()
            native.tl_program_run(program, self._pool, counts)
            best = min(best, time.perf_counter() - started)
            runs += 1
        native.tl_program_delete(program)
        del kept, kept_too
        return best / num_copies

    def _pack(
        self, format_code: int, rows: int, columns: int, num_bytes: int, num_copies: int
    ) -> np.ndarray:
        """uint8 [copies, bytes] of one random matrix, each copy at a multiple of 64 bytes."""
        random = np.random.default_rng(0)
        if format_code in SCALE_BYTES:
            # Whatever the nibbles are, all the scales and minima are one small number.
            one = random.integers(0, 256, num_bytes).astype(np.uint8)
            groups = one.reshape(-(-rows // PANEL_ROWS) * columns // GROUP, -1)
            groups[:, : SCALE_BYTES[format_code]] = 0x1C if format_code == FORMATS["q4"] else 0x3C
        else:
            one = np.empty(num_bytes, np.uint8)
            source = random.standard_normal((rows, columns), np.float32)
            packed = self._library.tl_pack(
                *(format_code, 0, source.ctypes.data, columns * 4, None, 0, rows, rows, columns),
                one.ctypes.data,
            )
            assert packed == 0
        room = aligned_bytes(num_copies * num_bytes).reshape(num_copies, num_bytes)
        room[:] = one
        return room

    def _limit(self, mix: str, num_rows: int) -> float:
        """Operations per second of the instructions that so many rows are multiplied with; 0 for
        formats and builds without a loop for them."""
        if mix not in MIXES:
            return 0.0
        if (mix, num_rows) not in self._operations_per_second:
            arguments = (MIXES.index(mix), self._halves, num_rows, LIMIT_ROUNDS)
            self._operations_per_second[mix, num_rows] = best_rate(
                lambda _: float(self._limits.tl_limit_operations(*arguments)),
                self._num_threads,
                self._seconds,
            )
        return self._operations_per_second[mix, num_rows]


def load_limits(name: str) -> ctypes.CDLL:
    """kernel_limits.cpp, compiled as the build `name` is."""
    source = Path(__file__).with_name("kernel_limits.cpp")
    with tempfile.TemporaryDirectory() as directory:
        target = str(Path(directory) / "limits.so")
        command = [
            *build.find_compiler(),
            *(*build.FLAGS, *build.instruction_sets()[name].flags, "-I", str(build.SOURCES)),
            *("-shared", str(source), "-o", target),
        ]
        subprocess.run(command, check=True, timeout=120)
        limits = ctypes.CDLL(target)
    limits.tl_limit_operations.argtypes = [
        *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
    ]
    limits.tl_limit_operations.restype = ctypes.c_double
    limits.tl_limit_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    limits.tl_limit_read.restype = ctypes.c_float
    return limits


def read_rate(limits: ctypes.CDLL, num_threads: int, seconds: float) -> float:
    """Bytes per second that the threads read from memory, the better way of two."""
    values = np.ones((num_threads, READ_BYTES // 4 // num_threads), np.float32)

    def read(thread: int, cache_level: int) -> float:
        part = values[thread]
        limits.tl_limit_read(part.ctypes.data, part.size // 64 * 64, cache_level)
        return float(part.nbytes)

    return max(
        best_rate(partial(read, cache_level=level), num_threads, seconds / 2) for level in (1, 2)
    )


def best_rate(work: Callable[[int], float], num_threads: int, seconds: float) -> float:
    """The most units per second that the threads do together; `work` returns how many it did."""
    best, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        units = [0.0] * num_threads

        def run_one(thread: int, units: list[float] = units) -> None:
            units[thread] = work(thread)

        threads = [
            threading.Thread(target=run_one, args=(thread,)) for thread in range(1, num_threads)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        run_one(0)
        for thread in threads:
            thread.join()
        best = max(best, sum(units) / (time.perf_counter() - started))
    return best


def aligned_bytes(size: int) -> np.ndarray:
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]


def random_rows(
    num_rows: int, columns: int, halves: int
) -> tuple[library.Rows, tuple[np.ndarray, ...]]:
    """Activations in every form, and the arrays that hold them."""
    random = np.random.default_rng(1)
    values = random.standard_normal((num_rows, columns), np.float32)
    quantised = random.integers(-127, 128, (num_rows, halves, columns)).astype(np.int8)
    scales = np.full((num_rows, columns // GROUP), 0.01, np.float32)
    whole = quantised.astype(np.float32).swapaxes(0, 1)
    steps = whole[0] if halves == 1 else 255 * whole[0] + whole[1]
    sums = scales * steps.reshape(num_rows, -1, GROUP).sum(-1, dtype=np.float32)
    arrays = (values, quantised, scales, sums)
    addresses = [array.ctypes.data for array in arrays]
    return library.Rows(addresses[0], columns, *addresses[1:], halves), arrays
