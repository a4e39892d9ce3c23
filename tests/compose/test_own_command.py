"""Messages name the command as it can be typed."""

import os
from pathlib import Path

import pytest

from compose.own_command import own_command


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / ".venv" / "bin" / "tokenline"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(path), "up"])
    monkeypatch.setenv("PATH", "/nowhere")
    return path


def test_below_the_working_directory_it_is_a_relative_path(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parents[2])
    assert own_command() == ".venv/bin/tokenline"
    monkeypatch.chdir(program.parent)
    assert own_command() == "./tokenline"


def test_elsewhere_it_is_the_whole_path(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program.parents[2] / "beside").mkdir()
    monkeypatch.chdir(program.parents[2] / "beside")
    assert own_command() == str(program)


def test_on_the_path_it_is_the_name_alone(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_command() == "tokenline"


def test_another_of_that_name_on_the_path_is_not_meant(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "tokenline"
    other.parent.mkdir()
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{other.parent}{os.pathsep}{program.parent}")
    monkeypatch.chdir(tmp_path)
    assert own_command() == ".venv/bin/tokenline"
