"""Programs that are held to AVX2 find nothing newer, and are themselves otherwise."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import library
from tests.bench import only_avx2 as only_avx2_module
from tests.bench.only_avx2 import only_avx2

CPU = Path("/proc/cpuinfo")
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not CPU.exists() or not {"cpuid_fault", "avx2"} <= set(CPU.read_text().split()),
    reason="this machine cannot hide what its CPU has",
)

# In the program, in a thread, and in a program that it starts.
ASKS = """
import subprocess, sys, threading
asks = "from kernels.cpu import library; print(library.runnable()[-1], flush=True)"
exec(asks)
thread = threading.Thread(target=exec, args=(asks,))
thread.start()
thread.join()
subprocess.run([sys.executable, "-c", asks], check=True)
"""


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **only_avx2(directory)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(not library.runnable(), reason="no native kernels are built")
def test_our_kernels_are_those_for_avx2(tmp_path: Path) -> None:
    done = run(ASKS, tmp_path)
    assert done.stdout.split() == ["avx2"] * 3, done.stderr


def test_torch_finds_avx2(tmp_path: Path) -> None:
    done = run("import torch; print(torch.backends.cpu.get_cpu_capability())", tmp_path)
    assert done.stdout.split() == ["AVX2"], done.stderr


def test_who_cannot_be_held_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_path = tmp_path / "text.so"
    library_path.write_text("not a library")
    monkeypatch.setattr(only_avx2_module, "compile_library", lambda *_: library_path)
    with pytest.raises(RuntimeError, match=r"(?s)nobody can be held to AVX2 here: .*it still sees"):
        only_avx2(tmp_path)


def test_a_fault_still_ends_a_program(tmp_path: Path) -> None:
    done = run("import ctypes; ctypes.string_at(0)", tmp_path)
    assert done.returncode == -signal.SIGSEGV
