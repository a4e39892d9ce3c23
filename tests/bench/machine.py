"""The machine's measured limits: bytes read from memory and int8 operations, per second.

Beside them a benchmark says what share of the possible a program reaches. The loops are in
machine_probe.c, compiled for this very machine; a run takes about a second.
"""

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SOURCE = Path(__file__).with_name("machine_probe.c")
# Several times a last-level cache, so that all of it comes from memory.
_ARRAY_BYTES = 256 << 20
_ROUNDS = 1 << 18
_REPETITIONS = 5


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Of `num_threads` threads together."""

    num_threads: int
    memory_bytes_per_second: float
    int8_operations_per_second: float  # a multiplication or an addition is one
    instructions: str  # the mix that was timed

    def best_of(self, other: "MachineLimits") -> "MachineLimits":
        """What else runs on a machine only ever takes from its limits."""
        return MachineLimits(
            self.num_threads,
            max(self.memory_bytes_per_second, other.memory_bytes_per_second),
            max(self.int8_operations_per_second, other.int8_operations_per_second),
            self.instructions,
        )

    def __str__(self) -> str:
        return (
            f"{self.num_threads} threads: memory {self.memory_bytes_per_second / 1e9:.1f} GB/s, "
            f"int8 {self.int8_operations_per_second / 1e9:.0f} GOP/s ({self.instructions})"
        )


def measure_limits(num_threads: int, architecture: str = "native") -> MachineLimits:
    """Times both loops on `num_threads` threads at once, with what `architecture` has (a value of
    the compiler's -march). RuntimeError without a C compiler."""
    with tempfile.TemporaryDirectory(prefix="tokenline-probe-") as directory:
        library = _load(compile_library(_SOURCE, Path(directory), "-O3", f"-march={architecture}"))
        library.fill_operands()
        words = np.ones((num_threads, _ARRAY_BYTES // 8 // num_threads), np.uint64)

        def read(thread: int) -> int:
            part = words[thread]
            library.read_words(part.ctypes.data, part.size)
            return int(part.nbytes)

        def multiply(thread: int) -> int:
            return int(library.int8_products(_ROUNDS, ctypes.byref(ctypes.c_int32())))

        return MachineLimits(
            num_threads,
            _best_rate(read, num_threads),
            _best_rate(multiply, num_threads),
            library.int8_instructions().decode(),
        )


def compile_library(source: Path, directory: Path, *flags: str) -> Path:
    """A shared library in `directory`, of one C file. RuntimeError where that fails."""
    compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        compiler = "cc"
    target = directory / source.with_suffix(".so").name
    command = [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise RuntimeError(f"{source.name} needs a C compiler: {error}") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{source.name} does not compile: {error.stderr}") from error
    return target


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.read_words.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.read_words.restype = ctypes.c_uint64
    library.int8_products.argtypes = [ctypes.c_uint64, ctypes.POINTER(ctypes.c_int32)]
    library.int8_products.restype = ctypes.c_uint64
    library.int8_instructions.restype = ctypes.c_char_p
    return library


def _best_rate(work: Callable[[int], int], num_threads: int) -> float:
    """The most units per second that the threads did together; `work` returns its units."""
    return max(_rate(work, num_threads) for _ in range(_REPETITIONS))


def _rate(work: Callable[[int], int], num_threads: int) -> float:
    barrier = threading.Barrier(num_threads + 1)
    done = [0] * num_threads

    def run(thread: int) -> None:
        barrier.wait()
        done[thread] = work(thread)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - started)
