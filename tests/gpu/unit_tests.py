"""The tests of the GPU's kernels on the device itself, by pytest, where that is installed."""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from tests.gpu.machine import Machine
from tests.gpu.records import Recorder

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = "tests/kernels/gpu"
# Compiles for devices that are not here.
LEFT_OUT = f"{DIRECTORY}/test_ahead_of_time.py"
# The project's own settings ask for plugins that need not be here.
SETTINGS = "[pytest]\npythonpath = .\nmarkers =\n    slow: real processes\n"
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b\s*(?:\[[^]]*\])?\s*(\S*)")
MAX_SHOWN = 40


def run_unit_tests(machine: Machine, recorder: Recorder) -> None:
    if find_spec("pytest") is None:
        recorder.skip("unit tests", "pytest is not installed")
        return
    with tempfile.TemporaryDirectory() as directory:
        settings = Path(directory) / "pytest.ini"
        settings.write_text(SETTINGS)
        command = [
            *(sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"),
            *("-c", str(settings), f"--rootdir={ROOT}", "--import-mode=importlib"),
            # The conftest of all tests needs the rest of the project.
            *(f"--confcutdir={ROOT / DIRECTORY}", f"--ignore={LEFT_OUT}", DIRECTORY),
            "--continue-on-collection-errors",
        ]
        if find_spec("xdist") is not None:
            command += ["-n", str(max(1, (os.cpu_count() or 2) - 2))]
        _follow(command, recorder)


def _follow(command: list[str], recorder: Recorder) -> None:
    """Counts outcomes as they come, so that those before a time limit are known."""
    outcomes: Counter[str] = Counter()
    last: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-MAX_SHOWN:], line]
            found = OUTCOME.search(line)
            if found is None or "::" not in line:
                continue
            outcomes[found[1]] += 1
            if found[1] in ("FAILED", "ERROR") and outcomes[found[1]] <= MAX_SHOWN:
                recorder.check(line.strip()[:200], False)
            if sum(outcomes.values()) % 100 == 0:
                recorder.note(_counted(outcomes))
    recorder.note(_counted(outcomes))
    summary = "".join(last[-MAX_SHOWN:])[-4000:]
    recorder.check("the kernels' unit tests pass", process.returncode == 0, summary)


def _counted(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome.lower()}" for outcome, count in outcomes.items())
