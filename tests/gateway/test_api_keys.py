"""The file of API keys: its form, its changes, and how a request carries a key."""

import base64
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.api_keys import ApiKeys
from gateway.errors import Unauthorized
from gateway.new_api_key import entry, main, new_key
from protos.wire.errors import StartupError


def name_of(keys: ApiKeys, key: str) -> str:
    return keys.name_of({"authorization": f"Bearer {key}"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_entries_comments_and_notes_are_read(path: Path) -> None:
    lines = ["# ours", "", entry("ann", "a"), f"  {entry('bob', 'b').upper()}:since May  "]
    path.write_text("\n".join(lines))
    keys = ApiKeys(path)
    assert name_of(keys, "a") == "ann"
    assert name_of(keys, "b") == "BOB"


def test_every_way_to_carry_a_key(path: Path) -> None:
    path.write_text(entry("ann", "sk-é"))
    keys = ApiKeys(path)
    assert keys.name_of({"authorization": "bearer sk-é "}) == "ann"
    assert keys.name_of({"x-api-key": "sk-é"}) == "ann"
    browser = base64.b64encode("anybody:sk-é".encode()).decode()
    assert keys.name_of({"authorization": f"Basic {browser}"}) == "ann"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "sk-a"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sk-b"},
        {"authorization": "Basic !"},
        {"authorization": "Basic /w=="},
        {"x-api-key": "sk-A"},
    ],
)
def test_anything_else_is_refused(path: Path, headers: dict[str, str]) -> None:
    path.write_text(entry("ann", "sk-a"))
    with pytest.raises(Unauthorized) as caught:
        ApiKeys(path).name_of(headers)
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "it holds no key"),
        ("# only a comment", "it holds no key"),
        ("ann", "line 1 is not"),
        (f"{entry('ann', 'a')}\nann:0123", "line 2 is not"),
        (f"an n:{'0' * 64}", "line 1 is not"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start(path: Path, text: str, cause: str) -> None:
    path.write_text(text)
    with pytest.raises(StartupError, match=cause):
        ApiKeys(path)


def test_a_missing_file_stops_the_start(path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        ApiKeys(path)


def test_changes_of_the_file_hold_at_once(path: Path) -> None:
    path.write_text(entry("ann", "a"))
    keys = ApiKeys(path)
    path.write_text(f"{entry('ann', 'a2')}\n{entry('bob', 'b')}")
    assert name_of(keys, "a2") == "ann" and name_of(keys, "b") == "bob"
    with pytest.raises(Unauthorized):
        name_of(keys, "a")


def test_a_file_that_turns_bad_leaves_the_keys_and_is_said_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(entry("ann", "a"))
    keys = ApiKeys(path)
    for spoil in (lambda: path.write_text("nonsense"), path.unlink):
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            spoil()
            assert [name_of(keys, "a") for _ in range(3)] == ["ann"] * 3
        assert len(caplog.records) == 1
    path.write_text(entry("bob", "b"))
    assert name_of(keys, "b") == "bob"


def test_new_keys_differ_and_their_entries_let_them_in(path: Path) -> None:
    assert new_key() != new_key()
    made = subprocess.run(
        [sys.executable, "-m", "gateway.new_api_key", "ann"], capture_output=True, text=True
    )
    path.write_text(made.stdout)
    key = made.stderr.splitlines()[0].split()[-1]
    assert name_of(ApiKeys(path), key) == "ann"
    assert [main([]), main(["a b"]), main(["a:b"])] == [2, 2, 2]
