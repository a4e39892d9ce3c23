"""Every op of the native library on random shapes and values: the same bits in every build."""

import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernels.cpu.build import build, library_path
from kernels.cpu.library import runnable
from tests.fakes.native_drivers import DRIVERS, compile_driver, compile_objects, run_driver

FUZZER = sorted(DRIVERS.glob("fuzz*.cpp"))
ROUNDS = 20
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"


def differences(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The cases whose digests differ, or that only one of the two has."""
    assert len(first) == len(second) > 0
    return [f"{a} | {b}" for a, b in zip(first, second, strict=True) if a != b]


def test_all_builds_give_the_same_bits(tmp_path: Path) -> None:
    """Within each run, rows have the same bits alone, among others and on any threads."""
    names = runnable()
    if len(names) < 2:
        pytest.skip(f"there is no second build to compare with: {names}")
    results = {}
    objects = compile_objects(tmp_path, FUZZER)
    for name in names:
        program = compile_driver(tmp_path / name, [*objects, library_path(name)])
        results[name] = run_driver(program, ROUNDS)
    for name in names[1:]:
        assert differences(results[names[0]], results[name]) == [], name


def test_neon_gives_the_same_bits(tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or not runnable():
        pytest.skip("compares with a build for x86-64")
    if not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"needs {CROSS_COMPILER} and {EMULATOR}")
    (library,) = build(tmp_path, ["neon"], ["-O1"], [CROSS_COMPILER], "aarch64")
    neon = compile_driver(tmp_path / "neon", [*FUZZER, library], compiler=[CROSS_COMPILER])
    best = runnable()[-1]
    native = compile_driver(tmp_path / best, [*FUZZER, library_path(best)])
    emulator = [EMULATOR, "-L", "/usr/aarch64-linux-gnu"]
    rounds = ROUNDS // 5
    assert differences(run_driver(native, rounds), run_driver(neon, rounds, emulator)) == []
