"""Compiles the native library, once per instruction set: `python kernels/cpu/build.py`.

Every build is whole, so that no function compiled for one instruction set can be linked into
another's; which one a process loads is chosen by library.py. Nothing here needs more than Python
and a C++17 compiler, since setup.py runs it where nothing else is installed.
"""

import argparse
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "native"
LIBRARIES = Path(__file__).resolve().parent / "lib"
# -ffp-contract=off: an fma where the source has none would change the bits. GCC 12 takes the
# undefined operands of its own AVX-512 intrinsics for uninitialised.
FLAGS = (
    *("-std=c++17", "-O3", "-g0", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"),
)
# The library brings its C++ runtime along: the one that Python has loaded may be older than the
# compiler.
_OWN_RUNTIME = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")


@dataclass(frozen=True)
class InstructionSet:
    """Flags of a build, and the macros with which a compiler says that a machine can run it."""

    flags: Sequence[str]
    macros: Sequence[str] = ()


_PORTABLE = InstructionSet(("-DTL_PORTABLE",))
_AVX2 = InstructionSet(
    ("-DTL_AVX2", "-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    ("__AVX2__", "__FMA__", "__F16C__", "__BMI2__"),
)
_AVX512 = InstructionSet(
    (
        *("-DTL_AVX512", "-mavx2", "-mfma", "-mf16c", "-mbmi2"),
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    ),
    ("__AVX512BW__", "__AVX512VL__", "__AVX512DQ__", "__AVX512VNNI__"),
)
_X86_64 = {
    "portable": _PORTABLE,
    "avx2": _AVX2,
    "avxvnni": InstructionSet(
        (*_AVX2.flags, "-DTL_AVXVNNI", "-mavxvnni"), (*_AVX2.macros, "__AVXVNNI__")
    ),
    "avx512": _AVX512,
    "amx": InstructionSet(
        (*_AVX512.flags, "-DTL_AMX", "-mamx-tile", "-mamx-int8"),
        (*_AVX512.macros, "__AMX_TILE__", "__AMX_INT8__"),
    ),
}
_AARCH64 = {
    "portable": _PORTABLE,
    "neon": InstructionSet(("-DTL_NEON", "-march=armv8.2-a+dotprod"), ("__ARM_FEATURE_DOTPROD",)),
}
# By what the machine calls itself; the best last. Another machine gets the portable build alone.
_OF_MACHINE: Mapping[str, Mapping[str, InstructionSet]] = {
    "x86_64": _X86_64,
    "AMD64": _X86_64,
    "aarch64": _AARCH64,
    "arm64": _AARCH64,
}


class BuildError(Exception):
    """Why the library cannot be built: no compiler, or what the compiler said."""


def library_path(instruction_set: str, directory: Path = LIBRARIES) -> Path:
    """Where the build for `instruction_set` lies, built or not."""
    return directory / f"tokenline_cpu_{instruction_set}.so"


def instruction_sets(machine: str = "") -> Mapping[str, InstructionSet]:
    """The builds that make sense for `machine`, by default this one."""
    return _OF_MACHINE.get(machine or platform.machine(), {"portable": _PORTABLE})


def interface() -> str:
    """A digest of api.h: a library that says another was built from other sources."""
    return hashlib.sha256((SOURCES / "api.h").read_bytes()).hexdigest()[:16]


def build(
    directory: Path = LIBRARIES,
    only: Sequence[str] = (),
    extra_flags: Sequence[str] = (),
    compiler: Sequence[str] = (),
    machine: str = "",
    objects: Path | None = None,
) -> list[Path]:
    """Brings the builds named in `only`, by default all of the machine, up to date in `directory`.

    Leaves out those that the compiler is too old for. `objects`, by default inside `directory`,
    keeps what is compiled, for the next time. Raises BuildError.
    """
    compiler = compiler or find_compiler()
    wanted = {
        name: each.flags
        for name, each in instruction_sets(machine).items()
        if (not only or name in only) and _accepts(compiler, each.flags)
    }
    objects = objects or directory / "objects"
    # The largest first, so that no core is left with it alone at the end.
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
    # Sanitizers need the runtime that is shared.
    runtime = () if extra_flags else _OWN_RUNTIME
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(objects):
        _in_parallel(
            partial(
                _compile,
                [*compiler, *FLAGS, *_flags_of(source, flags), *extra_flags],
                source,
                objects / name / f"{source.stem}.o",
            )
            for name, flags in wanted.items()
            for source in sources
        )
        for name in wanted:
            parts = [objects / name / f"{source.stem}.o" for source in sources]
            _link([*compiler, *extra_flags], parts, library_path(name, directory), runtime)
    return [library_path(name, directory) for name in wanted]


def find_compiler() -> Sequence[str]:
    """The C++ compiler to call: $CXX, else the first of the usual ones. Raises BuildError."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError(
        "there is no C++ compiler; install g++ or clang, then run `make native` "
        "(where Tokenline was installed with pip: `python -m kernels.cpu.build`)"
    )


def best_here(compiler: Sequence[str]) -> list[str]:
    """The best build that this machine can run; all where the compiler cannot tell."""
    try:
        printed = _run([*compiler, "-march=native", "-x", "c++", "-dM", "-E", os.devnull])
    except BuildError:
        return list(instruction_sets())
    macros = {line.split()[1] for line in printed.splitlines()}
    usable = [name for name, each in instruction_sets().items() if macros.issuperset(each.macros)]
    if "amx" in usable and not _may_use_amx():
        usable.remove("amx")
    return usable[-1:]


def _may_use_amx() -> bool:
    """Whether the system lets a process use what the machine has; see instruction_set.cpp."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        refused: int = ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)
    except (OSError, AttributeError):
        return False
    return refused == 0


def _accepts(compiler: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether the compiler knows an instruction set; all know the portable one's."""
    try:
        _run([*compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull])
    except BuildError:
        return flags == _PORTABLE.flags
    return True


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One build at a time; who waited then finds the other's."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flags_of(source: Path, flags: Sequence[str]) -> Sequence[str]:
    # What is asked whether the machine can run a build must itself run on every machine.
    if source.stem == "instruction_set":
        defines = [flag for flag in flags if flag.startswith("-D")]
        return [*defines, f'-DTL_INTERFACE="{interface()}"']
    return flags


def _in_parallel(jobs: Iterable[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        try:
            for running in [threads.submit(job) for job in jobs]:
                running.result()
        finally:
            threads.shutdown(cancel_futures=True)


def _compile(command: Sequence[str], source: Path, target: Path) -> None:
    included = target.with_suffix(".d")
    if _is_newer(target, [source, Path(__file__), *_named_in(included)]):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # As old as what it was made from: an edit while the compiler runs counts as later.
    started = time.time_ns()
    unfinished = target.with_suffix(".unfinished")
    _run([*command, "-MMD", "-MF", str(included), "-c", str(source), "-o", str(unfinished)])
    os.utime(unfinished, ns=(started, started))
    unfinished.replace(target)


def _named_in(dependencies: Path) -> list[Path]:
    """The files that a compiler's rule for make names as read: `target: source header …`."""
    if not dependencies.exists():
        return [dependencies]
    rule = dependencies.read_text().replace("\\\n", " ").partition(": ")[2]
    return [Path(name.replace("\\ ", " ")) for name in re.findall(r"(?:\\ |\S)+", rule)]


def _link(
    command: Sequence[str], parts: Sequence[Path], target: Path, runtime: Sequence[str]
) -> None:
    # The directory of the sources changes when one is taken away.
    if _is_newer(target, [*parts, SOURCES]):
        return
    # Written beside and moved, since the old one may be loaded somewhere.
    unfinished = target.with_suffix(".unfinished")
    link = [*command, "-shared", "-pthread", *map(str, parts), "-o", str(unfinished)]
    try:
        _run([*link, *runtime])
    except BuildError:
        # Some systems have no static one.
        _run(link)
    unfinished.replace(target)


def _is_newer(target: Path, sources: Sequence[Path]) -> bool:
    try:
        return target.stat().st_mtime_ns > max(source.stat().st_mtime_ns for source in sources)
    except FileNotFoundError:
        return False


def _run(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{shlex.join(command)} failed:\n{error.stderr}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--directory", type=Path, default=LIBRARIES, help="where to put them")
    parser.add_argument("--objects", type=Path, help="where to keep what is compiled")
    parser.add_argument(
        "--this-machine", action="store_true", help="only the best build that runs here"
    )
    parser.add_argument("--optional", action="store_true", help="exit with 0 also where it fails")
    options = parser.parse_args()
    try:
        compiler = find_compiler()
        wanted = best_here(compiler) if options.this_machine else list(instruction_sets())
        built = build(options.directory, wanted, compiler=compiler, objects=options.objects)
    except BuildError as error:
        print(
            f"no compiled CPU kernels, so engines compute through torch, slowly: {error}",
            file=sys.stderr,
        )
        sys.exit(0 if options.optional else 1)
    for name in wanted:
        if library_path(name, options.directory) not in built:
            print(f"{compiler[0]} is too old for the {name} kernels", file=sys.stderr)


if __name__ == "__main__":
    main()
