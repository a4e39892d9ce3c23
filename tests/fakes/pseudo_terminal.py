"""Runs a command in a terminal that a test types into and reads from."""

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

EXPECT_SECONDS = 30.0


@dataclass
class PseudoTerminal:
    """`seen` is everything that the command has written so far."""

    descriptor: int
    seen: str = field(default="")
    _searched: int = 0

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def expect(self, text: str) -> None:
        """Reads until `text` was written, after what was expected before."""
        assert self._comes(text, EXPECT_SECONDS), f"{text!r} did not come:\n{self.seen}"

    def interrupt(self, text: str) -> None:
        """Types Ctrl-C until `text` was written: Python's input() misses a signal that comes just
        as it begins to wait, and whoever pressed the key presses it again."""
        deadline = time.monotonic() + EXPECT_SECONDS
        self.type("\x03")
        while not self._comes(text, 1.0):
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.seen}"
            self.type("\x03")

    def _comes(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (at := self.seen.find(text, self._searched)) < 0:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self.descriptor], [], [], left)
            if not ready:
                return False
            self.seen += os.read(self.descriptor, 4096).decode(errors="replace")
        self._searched = at + len(text)
        return True


@contextmanager
def in_terminal(
    command: Sequence[str],
) -> Iterator[tuple[subprocess.Popen[bytes], PseudoTerminal]]:
    """Runs `command` with the terminal as its own; it is killed at the end if it still runs."""
    ours, theirs = pty.openpty()
    try:
        # setsid --ctty: the terminal's Ctrl-C goes to the session whose terminal it is.
        process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200"},
            # A run in the background may ignore SIGINT, which children would inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        try:
            yield process, PseudoTerminal(ours)
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(ours)
