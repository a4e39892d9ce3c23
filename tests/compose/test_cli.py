"""The command starts fast, and every error is one line that says what to do."""

import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HEAVY = {"torch", "grpc", "transformers", "numpy", "tokenizers", "starlette", "redis"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("tokenline")), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def test_the_command_loads_nothing_heavy() -> None:
    code = "import sys, compose.cli, compose.commands; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert HEAVY & {name.partition(".")[0] for name in result.stdout.split()} == set()


@pytest.mark.parametrize("command", ["up", "pull", "chat", "ps"])
def test_each_command_has_help(command: str) -> None:
    # The last one: no colours on the build machines that typer knows.
    plain = {"COLUMNS": "200", "NO_COLOR": "1", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}
    result = run(command, "--help", **plain)
    assert result.returncode == 0
    # Every option says what it is for.
    options = [line for line in result.stdout.splitlines() if re.match(r"│ +--", line)]
    assert options
    assert all(len(line.strip("│ ").split()) > 3 for line in options)


def test_without_arguments_the_commands_are_listed() -> None:
    result = run()
    assert all(command in result.stdout + result.stderr for command in ("up", "pull", "chat", "ps"))


def test_the_version_is_that_of_the_installation() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"tokenline {version('tokenline')}\n")


@pytest.mark.parametrize("command", [["pull", ""], ["up", "--model", ""]])
def test_an_empty_name_of_a_model_is_one_line(command: list[str]) -> None:
    result = run(*command)
    assert result.returncode == 1
    assert "SmolLM2-135M-Instruct" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ps_without_a_line_says_how_to_start_one(tmp_path: Path) -> None:
    result = run("ps", XDG_RUNTIME_DIR=str(tmp_path))
    assert result.returncode == 1
    assert re.fullmatch(
        r"tokenline: no line runs here: start one with `\S*tokenline up`\n", result.stderr
    )


def test_a_missing_model_is_one_line() -> None:
    result = run("up", "--model", "no-such-model")
    assert result.returncode == 1
    assert result.stderr.startswith("tokenline: model not found: no-such-model")
    assert len(result.stderr.splitlines()) == 1


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        result = run("up", "--model", str(model), "--port", port, XDG_RUNTIME_DIR=str(tmp_path))
    assert result.returncode == 1
    assert f"port {port} is taken" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_model_larger_than_the_memory_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    with model.open("wb") as file:
        file.write(b"GGUF")
        # A sparse file: it takes no room.
        file.truncate(1 << 43)
    result = run("up", "--model", str(model), "--port", "0", XDG_RUNTIME_DIR=str(tmp_path))
    assert result.returncode == 1
    assert "not enough memory" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("place", ["/proc/nope", "file"])
@pytest.mark.parametrize("command", [["up", "--port", "0", "--model", "m.gguf"], ["pull"]])
def test_a_cache_that_cannot_be_used_is_one_line(
    command: list[str], place: str, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").touch()
    arguments = [str(tmp_path / text) if text == "m.gguf" else text for text in command]
    result = run(*arguments, XDG_CACHE_HOME=str(tmp_path / place), XDG_RUNTIME_DIR="")
    assert result.returncode == 1
    assert result.stderr.startswith("tokenline: cannot write to ")
    assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_while_the_command_is_loaded_is_quiet() -> None:
    """The signal comes in the middle of the import of what the commands need."""
    code = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
import compose.cli
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
