"""The compiler's sanitizers: flags, surroundings, and whether they run on this machine."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.native_drivers import compiler_or_skip

_EMPTY_PROGRAM = "int main() { return 0; }\n"


@dataclass(frozen=True)
class Sanitizer:
    """One kind of check that a program can be compiled with."""

    name: str
    flags: Sequence[str]
    environment: Mapping[str, str]
    wrapper: Sequence[str] = ()

    def __str__(self) -> str:
        return self.name

    def skip_where_it_does_not_run(self, directory: Path) -> None:
        """Skips the test where its runtime is missing, or refuses this kernel."""
        compiler = compiler_or_skip()
        source, program = directory / "empty.cpp", directory / "empty"
        source.write_text(_EMPTY_PROGRAM)
        built = subprocess.run(
            [*compiler, *self.flags, source, "-o", program], capture_output=True, text=True
        )
        if built.returncode:
            pytest.skip(f"{compiler[0]} has no {self.name} sanitizer: {built.stderr[-200:]}")
        ran = subprocess.run(
            [*self.wrapper, program],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            pytest.skip(f"the {self.name} sanitizer does not run here: {ran.stderr[-200:]}")


# -fno-sanitize-recover: the first finding ends the program.
ADDRESS = Sanitizer(
    "address",
    ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    {"ASAN_OPTIONS": "detect_stack_use_after_return=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
)
# Fixed addresses, since older runtimes do not know all that newer kernels give out.
THREAD = Sanitizer(
    "thread",
    ("-fsanitize=thread",),
    {"TSAN_OPTIONS": "halt_on_error=1"},
    ("setarch", "-R"),
)
