"""Log lines of many processes: a prefix each, colours in a terminal only."""

import io

import pytest
from rich.console import Console

from compose.line_log import LineLog


def written(lines: list[tuple[str, str]], *, terminal: bool) -> str:
    colours = "standard" if terminal else None
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=colours, width=30)
    log = LineLog(console, ["gateway", "engine_svc-2"])
    for name, line in lines:
        log.write(name, line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_prefixes_are_aligned_and_long_lines_stay_whole() -> None:
    text = written([("gateway", "x" * 100), ("engine_svc-2", "y")], terminal=False)
    assert text == f"gateway      | {'x' * 100}\nengine_svc-2 | y\n"


def test_colours_appear_in_a_terminal_only() -> None:
    assert "\x1b[36mgateway" in written([("gateway", "x")], terminal=True)
    assert "\x1b[33mengine_svc-2" in written([("engine_svc-2", "x")], terminal=True)
    assert "\x1b" not in written([("gateway", "x")], terminal=False)


@pytest.mark.parametrize("line", ["[bold]x[/bold]", "[/nothing]", "a :smile: b"])
def test_a_log_line_is_never_taken_for_markup(line: str) -> None:
    assert line in written([("gateway", line)], terminal=False)
