"""Compiles the native library, once per instruction set: `python -m kernels.cpu.build`.

Every build is whole, so that no function compiled for one instruction set can be linked into
another's; which one a process loads is chosen by library.py. Nothing here needs more than Python
and a C++17 compiler, and it is also called by setup.py.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "native"
LIBRARIES = Path(__file__).resolve().parent / "lib"
# -ffp-contract=off: an fma where the source has none would change the bits. GCC 12 takes the
# undefined operands of its own AVX-512 intrinsics for uninitialised.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"),
)
_X86_64 = {
    "portable": ("-DTL_PORTABLE",),
    "avx2": ("-DTL_AVX2", "-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx512": (
        *("-DTL_AVX512", "-mavx2", "-mfma", "-mf16c", "-mbmi2"),
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    ),
}
_AARCH64 = {
    "portable": ("-DTL_PORTABLE",),
    "neon": ("-DTL_NEON", "-march=armv8.2-a+dotprod"),
}
# By what the machine calls itself; the best last. Another machine gets the portable build alone.
INSTRUCTION_SETS: Mapping[str, Mapping[str, Sequence[str]]] = {
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


def instruction_sets(machine: str = "") -> Mapping[str, Sequence[str]]:
    """The builds that make sense for `machine`, by default this one, with their flags."""
    return INSTRUCTION_SETS.get(machine or platform.machine(), {"portable": ("-DTL_PORTABLE",)})


def build(
    directory: Path = LIBRARIES,
    only: Sequence[str] = (),
    extra_flags: Sequence[str] = (),
    compiler: Sequence[str] = (),
    machine: str = "",
) -> list[Path]:
    """Compiles all builds, or those named in `only`, into `directory`; raises BuildError."""
    compiler = compiler or find_compiler()
    wanted = {
        name: flags for name, flags in instruction_sets(machine).items() if not only or name in only
    }
    directory.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as threads:
        jobs = {
            (name, source): threads.submit(
                _run,
                [
                    *compiler,
                    *FLAGS,
                    *flags,
                    *extra_flags,
                    *("-c", str(source), "-o", str(Path(objects) / f"{name}_{source.stem}.o")),
                ],
            )
            for name, flags in wanted.items()
            for source in sources
        }
        for job in jobs.values():
            job.result()
        built = []
        for name in wanted:
            # Written beside and moved, since the old one may be loaded somewhere.
            target = library_path(name, directory)
            unfinished = target.with_suffix(f".{os.getpid()}.tmp")
            parts = [str(Path(objects) / f"{name}_{source.stem}.o") for source in sources]
            _run([*compiler, *extra_flags, "-shared", "-pthread", *parts, "-o", str(unfinished)])
            unfinished.replace(target)
            built.append(target)
    return built


def find_compiler() -> Sequence[str]:
    """The C++ compiler to call: $CXX, else the first of the usual ones. Raises BuildError."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C++ compiler; install g++ or clang, or set CXX")


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{shlex.join(command)} failed:\n{error.stderr}") from error


def main() -> None:
    try:
        for path in build():
            print(path)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
