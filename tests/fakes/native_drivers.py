"""C++ programs that work the native library from outside: how tests compile and run them."""

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu.build import SOURCES, BuildError, find_compiler

DRIVERS = Path(__file__).resolve().parent.parent / "kernels" / "native"
# Long enough for a machine that does something else too.
TIMEOUT_SECONDS = 600
_FLAGS = ("-std=c++17", "-O1", "-g0", "-pthread", "-Wall", "-Wextra", f"-I{SOURCES}")


def compiler_or_skip() -> Sequence[str]:
    """The compiler that the library would be built with; without one the test is skipped."""
    try:
        return find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


def compile_driver(
    program: Path,
    sources: Sequence[Path],
    flags: Sequence[str] = (),
    compiler: Sequence[str] = (),
) -> Path:
    """Compiles and links `sources`, objects and libraries among them, and returns `program`."""
    compiler = compiler or compiler_or_skip()
    objects = compile_objects(
        program.parent, [each for each in sources if each.suffix == ".cpp"], flags, compiler
    )
    rest = [each for each in sources if each.suffix != ".cpp"]
    link = [*compiler, "-pthread", *flags, *objects, *rest, "-o", program]
    subprocess.run(link, check=True, timeout=TIMEOUT_SECONDS)
    return program


def compile_objects(
    directory: Path,
    sources: Sequence[Path],
    flags: Sequence[str] = (),
    compiler: Sequence[str] = (),
) -> list[Path]:
    """Compiles each of `sources` to an object in `directory`."""
    compiler = compiler or compiler_or_skip()
    objects = [directory / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, target: Path) -> None:
        command = [*compiler, *_FLAGS, *flags, "-c", source, "-o", target]
        subprocess.run(command, check=True, timeout=TIMEOUT_SECONDS)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_one, sources, objects))
    return objects


def run_driver(
    program: Path,
    rounds: int,
    wrapper: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> list[str]:
    """Runs it, and returns the lines that it printed before the one that says all is well."""
    finished = subprocess.run(
        [*wrapper, program, str(rounds)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert finished.returncode == 0, finished.stderr[-8000:]
    *lines, last = finished.stdout.splitlines()
    assert last == "all hold"
    return lines
