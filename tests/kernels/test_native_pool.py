"""The thread pool of the native kernels: nothing is lost or read early, however threads meet."""

from pathlib import Path

import pytest

from kernels.cpu.build import SOURCES
from tests.fakes.native_drivers import DRIVERS, compile_driver, run_driver
from tests.fakes.sanitizers import THREAD, Sanitizer

NAMES = ("stage.cpp", "lookahead.cpp", "pool.cpp", "program.cpp")
POOL = [*(SOURCES / name for name in NAMES), DRIVERS / "pool_driver.cpp"]


def test_the_pool_holds_what_it_promises(tmp_path: Path) -> None:
    run_driver(compile_driver(tmp_path / "pool", POOL), rounds=100)


@pytest.mark.parametrize("sanitizer", [THREAD], ids=str)
def test_the_pool_has_no_races(tmp_path: Path, sanitizer: Sanitizer) -> None:
    sanitizer.skip_where_it_does_not_run(tmp_path)
    program = compile_driver(tmp_path / "pool", POOL, sanitizer.flags)
    run_driver(program, 20, sanitizer.wrapper, sanitizer.environment)
