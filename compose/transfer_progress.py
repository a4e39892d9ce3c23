"""Shows how far a transfer is: a bar in a terminal, two lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def transfer_progress(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that takes (bytes so far, bytes in all)."""
    if not console.is_terminal:
        console.print(f"{title} …")
        yield lambda done, total: None
        console.print(f"{title}: done")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
