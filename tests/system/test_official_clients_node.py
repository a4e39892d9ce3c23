"""The npm `openai` client against a real line: every check of clients/openai_client.mjs."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.running_line import RunningLine

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
CLIENTS = Path(__file__).with_name("clients")
SCRIPT = CLIENTS / "openai_client.mjs"
CHECKS = re.findall(r"^  async (\w+)\(", SCRIPT.read_text(), flags=re.MULTILINE)
INSTALL = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")

Run = Callable[..., str]


def output_of(*command: str, directory: Path, seconds: float) -> str:
    """What `command` prints; the test fails with all of it if the command does."""
    result = subprocess.run(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    said = f"{result.stdout}\n{result.stderr}"
    assert result.returncode == 0, f"{' '.join(command)} ended with {result.returncode}:\n{said}"
    return result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs the script with arguments, next to the client's pinned version as npm installs it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None:
        pytest.skip("Node.js is not installed, so its client cannot be run")
    assert npm is not None, "Node.js is installed without npm, which fetches the client"
    directory = tmp_path_factory.mktemp("npm")
    for name in ("package.json", "package-lock.json", SCRIPT.name):
        shutil.copy(CLIENTS / name, directory)
    output_of(npm, *INSTALL, directory=directory, seconds=120)

    def run(*arguments: str) -> str:
        return output_of(node, SCRIPT.name, *arguments, directory=directory, seconds=60)

    yield run
    # pytest keeps the directories of its last runs, and this one is large.
    shutil.rmtree(directory / "node_modules")


@pytest.mark.parametrize("check", CHECKS)
def test_the_npm_client(check: str, run: Run, line: RunningLine) -> None:
    run(check, MODEL, *line.state.gateway_urls)


def test_every_check_of_the_script_is_run(run: Run) -> None:
    assert len(CHECKS) > 0
    assert run("names").split() == CHECKS
