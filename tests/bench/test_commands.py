"""Every bench says what it does."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [(), ("beside",), ("roofline",)], ids=" ".join)
def test_help_is_printed(name: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.bench", *name, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m tests.bench{''.join(f' {one}' for one in name)}" in done.stdout
