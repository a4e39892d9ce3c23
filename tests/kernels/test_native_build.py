"""Building the native library: what is compiled when, and what happens where it cannot be."""

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernels.cpu import build as native
from kernels.cpu import library
from kernels.cpu.build import BuildError, build, instruction_sets, library_path
from tests.fakes.native_drivers import compiler_or_skip

ROOT = Path(__file__).resolve().parents[2]
BUILD = [sys.executable, str(ROOT / "kernels" / "cpu" / "build.py")]
# Stands in for a compiler: notes what it was asked for, and writes something. It knows no VNNI, as
# GCC 7.
OLD_COMPILER = """#!/bin/sh
case "$*" in *-mavx*vnni*) echo "unrecognized option" >&2; exit 1;; esac
echo "$*" >> "$(dirname "$0")/calls"
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo made > "$2"; fi; shift; done
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of two sources, of which one includes a header."""
    directory = tmp_path / "native"
    directory.mkdir()
    (directory / "api.h").write_text("int one();\n")
    (directory / "with.cpp").write_text('#include "api.h"\nint one() { return 1; }\n')
    (directory / "without.cpp").write_text("int two() { return 2; }\n")
    monkeypatch.setattr(native, "SOURCES", directory)
    return directory


@pytest.fixture
def old_compiler(tmp_path: Path) -> Path:
    path = tmp_path / "old-compiler"
    path.write_text(OLD_COMPILER)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def objects_in(directory: Path) -> dict[str, int]:
    found = sorted((directory / "objects").rglob("*.o"))
    return {path.stem: path.stat().st_mtime_ns for path in found}


def touch_later(path: Path) -> None:
    """Makes it newer than all that was made so far, however coarse the clock of the files is."""
    later = path.stat().st_mtime_ns + 5_000_000_000
    os.utime(path, ns=(later, later))


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}


def test_only_what_includes_a_changed_file_is_compiled_again(sources: Path, tmp_path: Path) -> None:
    compiler_or_skip()
    target = tmp_path / "lib"
    (path,) = build(target, ["portable"])
    before, linked = objects_in(target), path.stat().st_ino
    build(target, ["portable"])
    assert (objects_in(target), path.stat().st_ino) == (before, linked)
    touch_later(sources / "api.h")
    build(target, ["portable"])
    after = objects_in(target)
    assert after["with"] != before["with"]
    assert after["without"] == before["without"]
    assert path.stat().st_ino != linked


def test_an_error_of_the_compiler_is_told(sources: Path, tmp_path: Path) -> None:
    compiler_or_skip()
    (sources / "without.cpp").write_text("int two() { return nothing; }\n")
    with pytest.raises(BuildError, match="nothing"):
        build(tmp_path / "lib", ["portable"])
    assert not library_path("portable", tmp_path / "lib").exists()


def test_builds_that_the_compiler_is_too_old_for_are_left_out(
    tmp_path: Path, old_compiler: Path
) -> None:
    if "avx512" not in instruction_sets():
        pytest.skip("for x86-64")
    command = [*BUILD, "--directory", str(tmp_path / "lib")]
    finished = subprocess.run(
        command, env=environment(CXX=str(old_compiler)), capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    too_new = ("avxvnni", "avx512", "amx")
    left_out = [f"{old_compiler} is too old for the {name} kernels" for name in too_new]
    assert finished.stderr.splitlines() == left_out
    built = sorted(path.name for path in (tmp_path / "lib").glob("*.so"))
    assert built == ["tokenline_cpu_avx2.so", "tokenline_cpu_portable.so"]


def test_what_the_system_withholds_is_not_the_best_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler for this very machine knows what it has, not what a process may use of it."""
    macros = {macro for each in instruction_sets("x86_64").values() for macro in each.macros}
    printed = "".join(f"#define {macro} 1\n" for macro in macros)
    monkeypatch.setattr(native, "instruction_sets", lambda: instruction_sets("x86_64"))
    monkeypatch.setattr(native, "_run", lambda _: printed)
    for allows, best in ((True, "amx"), (False, "avx512")):
        monkeypatch.setattr(native, "_may_use_amx", lambda allows=allows: allows)
        assert native.best_here(["c++"]) == [best]


@pytest.mark.parametrize(("arguments", "status"), [([], 1), (["--optional"], 0)])
def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, arguments: Sequence[str], status: int
) -> None:
    command = [*BUILD, "--directory", str(tmp_path / "lib"), *arguments]
    empty = environment(PATH=str(tmp_path), CXX="")
    finished = subprocess.run(command, env=empty, capture_output=True, text=True)
    assert finished.returncode == status
    (line,) = finished.stderr.splitlines()
    assert line.startswith("no compiled CPU kernels") and "make native" in line


def test_a_library_of_other_sources_is_refused(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library.available():
        pytest.skip("there is no library")
    # The interface is a digest of this api.h now, which is another's.
    with pytest.raises(OSError, match="make native"):
        library.load.__wrapped__(library.available()[0])


def test_every_build_that_the_compiler_knows_is_there() -> None:
    compiler = compiler_or_skip()
    known = [
        name for name, each in instruction_sets().items() if native._accepts(compiler, each.flags)
    ]
    assert library.available() == known, "make native"


@pytest.mark.slow
def test_a_wheel_is_for_every_machine_of_its_platform(tmp_path: Path, old_compiler: Path) -> None:
    """And holds the sources, so that the kernels can be compiled later."""
    copy = tmp_path / "copy"
    listed = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "protos", "kernels"]
    for name in listed:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("lib", "__pycache__", "*_pb2*")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        tmp_path,
    ]
    subprocess.run([*command, copy], check=True, env=environment(CXX=str(old_compiler)))
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name and "-any" not in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    libraries = {name for name in names if name.startswith("kernels/cpu/lib/")}
    built = set(instruction_sets()).difference({"avxvnni", "avx512", "amx"})
    expected = {f"kernels/cpu/lib/tokenline_cpu_{name}.so" for name in built}
    assert libraries == expected
    assert {"kernels/cpu/native/api.h", "kernels/cpu/native/pool.cpp"} <= names
