"""Holds programs to AVX2 on a machine that has more, so that they compare as on one without."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.bench.machine import compile_library

_SOURCE = Path(__file__).with_name("only_avx2.c")
# Whether CPUID faults in a program (arch_prctl(2), ARCH_GET_CPUID): one that could not preload the
# library says so, and runs all the same.
_PROBE = """
import ctypes, sys
if ctypes.CDLL(None).syscall(158, 0x1011) != 0:
    sys.exit("it still sees all that the CPU has")
"""


def only_avx2(directory: Path) -> Mapping[str, str]:
    """What the environment of programs must have for them to find AVX2 and nothing newer.

    It holds those that choose their kernels as they start or load them; what was compiled for
    newer instructions runs these all the same. The library that does it is written to `directory`.
    RuntimeError where it cannot be compiled, or the machine cannot hide what its CPU has.
    """
    # initfirst: before the constructors of other libraries, which may look already.
    library = compile_library(_SOURCE, directory, "-O2", "-Wl,-z,initfirst")
    preloaded = filter(None, [str(library), os.environ.get("LD_PRELOAD", "")])
    environment = {"LD_PRELOAD": " ".join(preloaded)}
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if probe.returncode != 0:
        raise RuntimeError(f"nobody can be held to AVX2 here: {probe.stderr.strip()}")
    return environment
