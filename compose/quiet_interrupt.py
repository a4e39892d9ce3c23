"""Once imported, Ctrl-C ends the process without a word, until `restore` is called.

Loading what the commands need takes a while, in which Python's own answer to Ctrl-C would be a
traceback. So this is a module that acts when it is imported: cli.py imports it before all others.
"""

import os
import signal
from typing import Final

INTERRUPTED: Final = 130
_usual = signal.getsignal(signal.SIGINT)


def restore() -> None:
    """Gives Ctrl-C its usual meaning again."""
    signal.signal(signal.SIGINT, _usual)


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)


# A program that a shell started in the background ignores Ctrl-C, and goes on doing so.
if _usual is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
