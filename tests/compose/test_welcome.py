"""The launcher's last words before it serves are true, and its commands can be typed."""

import io
from pathlib import Path

from rich.console import Console

from compose.line import LineOptions, build_line
from compose.own_command import own_command
from compose.readiness import Readiness
from compose.welcome import print_welcome


def welcome(redis_url: str = "", *, has_redis: bool) -> str:
    options = LineOptions(Path("m.gguf"), "127.0.0.1", (8000,), redis_url=redis_url)
    console = Console(file=io.StringIO(), width=40)
    print_welcome(build_line(options, range(1, 5)), Readiness("m", has_redis), 1.0, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_says_where_the_api_is_and_what_to_type() -> None:
    text = welcome(has_redis=True)
    assert "ready at http://127.0.0.1:8000/v1 (model m, 1.0 s)" in text
    assert f"`{own_command()} chat`" in text
    assert "WARNING" not in text


def test_a_redis_that_is_away_is_the_last_thing_said() -> None:
    text = welcome("redis://user:secret@10.0.0.1:6379/0", has_redis=False)
    *_, last = text.strip().splitlines()
    assert last.startswith("WARNING: Redis cannot be reached at redis://***@10.0.0.1:6379/0.")
    assert "secret" not in text
