"""The error that ends a command: one sentence that says why, and what to do next."""

import errno
from pathlib import Path


class CommandError(Exception):
    """A command cannot do what was asked. The message is for people and fits on one line."""


def is_out_of_space(error: BaseException | None) -> bool:
    """Whether `error`, or one that led to it, says that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_space(what: str, directory: Path) -> CommandError:
    """What to say when `what` does not fit."""
    return CommandError(
        f"cannot fetch {what}: no space is left in {directory} (or where temporary files go); "
        "free some, or set XDG_CACHE_HOME to another place"
    )
