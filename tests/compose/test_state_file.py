"""A running line can be found by other commands; a dead one cannot."""

import json
from pathlib import Path

import pytest

from compose.directories import cache_directory, state_directory
from compose.errors import CommandError
from compose.state_file import ServiceState, StateFile, running_lines

SERVICES = [ServiceState("gateway", 1, "127.0.0.1:8000", 0), ServiceState("redis", 2, "x:1", 3)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "run", "m.gguf", ["http://127.0.0.1:8000"])
    file.write(SERVICES)
    (line,) = running_lines(tmp_path / "run")
    assert line.services == tuple(SERVICES)
    assert line.gateway_urls == ("http://127.0.0.1:8000",)
    assert line.model == "m.gguf"
    file.remove()
    assert running_lines(tmp_path / "run") == []


@pytest.mark.parametrize("change", [{"launcher_started_at": 1.0}, {"launcher_pid": 2**22 + 1}])
def test_the_file_of_a_dead_launcher_is_removed(change: dict[str, float], tmp_path: Path) -> None:
    StateFile(tmp_path, "m.gguf", []).write(SERVICES)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert running_lines(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"services": [{"unknown": 1}]}'])
def test_a_file_of_another_version_is_removed(text: str, tmp_path: Path) -> None:
    (tmp_path / "line-1.json").write_text(text)
    assert running_lines(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_no_directory_means_no_line(tmp_path: Path) -> None:
    assert running_lines(tmp_path / "none") == []


def test_directories_follow_the_environment(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    assert cache_directory(environment) == tmp_path / "tokenline"
    assert state_directory(environment) == tmp_path / "tokenline"
    # A relative XDG path is to be ignored; without a runtime directory the cache is used.
    assert cache_directory({"XDG_CACHE_HOME": "here"}) == Path.home() / ".cache" / "tokenline"
    assert state_directory({}) == Path.home() / ".cache" / "tokenline" / "run"


def test_a_place_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "run", Path("/proc/nope/run")):
        with pytest.raises(CommandError, match=r"cannot write to .*XDG_CACHE_HOME"):
            StateFile(place, "m.gguf", [])
        assert running_lines(place) == []


def test_a_place_that_has_gone_is_one_line_and_nothing_to_remove(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "run", "m.gguf", [])
    (tmp_path / "run").rmdir()
    with pytest.raises(CommandError, match="cannot write to"):
        file.write(SERVICES)
    file.remove()
