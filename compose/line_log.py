"""Prints the log lines of many processes as one: each behind its service's name and colour."""

from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.text import Text

_COLOURS: Final = {
    "gateway": "cyan",
    "tokenizer_svc": "magenta",
    "detok_svc": "green",
    "engine_svc": "yellow",
    "redis": "blue",
}


class LineLog:
    """Writes `name | line`. Colours appear in a terminal only."""

    def __init__(self, console: Console, names: Iterable[str]) -> None:
        self._console = console
        self._width = max((len(name) for name in names), default=0)

    def write(self, name: str, line: str) -> None:
        """Prints one line, without its newline, of the service `name`."""
        service = name.partition("-")[0]
        text = Text(f"{name:<{self._width}} | ", style=_COLOURS.get(service, "bold"))
        text.append(line, style="default")
        # Soft wrap: the terminal breaks long lines, and a pipe gets each line whole.
        self._console.print(text, soft_wrap=True)
