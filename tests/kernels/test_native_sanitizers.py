"""The native library under the compiler's sanitizers, with the fuzzers of test_native_fuzz.py.

Address and undefined-behaviour checks take the build of this machine whose vectors are the widest:
not AMX, whose loads and stores no sanitizer sees. The builds differ in simd.h, linear_dots.h and
linear_amx.h alone; an access out of bounds that another build makes would be one that gives other
bits, or is made by this one too.
"""

from pathlib import Path

import pytest

from kernels.cpu.build import build
from kernels.cpu.library import runnable
from tests.fakes.native_drivers import DRIVERS, compile_driver, run_driver
from tests.fakes.sanitizers import ADDRESS, THREAD, Sanitizer

FUZZER = sorted(DRIVERS.glob("fuzz*.cpp"))


@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD], ids=str)
def test_the_kernels_are_clean(tmp_path: Path, sanitizer: Sanitizer) -> None:
    sanitizer.skip_where_it_does_not_run(tmp_path)
    seen = [name for name in runnable() if name != "amx"]
    best = seen[-1:] or ["portable"]
    (library,) = build(tmp_path, best, ["-O1", *sanitizer.flags])
    program = compile_driver(tmp_path / "fuzz", [*FUZZER, library], sanitizer.flags)
    run_driver(program, 8, sanitizer.wrapper, sanitizer.environment)
