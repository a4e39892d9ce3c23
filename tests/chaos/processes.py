"""The processes of a chaos run: started, hurt, and started again at once when they end."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from compose.child import Child

# As `tokenline up` does after a first crash.
_RESTART_DELAY_SECONDS: Final = 0.25
_STOP_SECONDS: Final = 20.0
_TAIL_LINES: Final = 40


class Process:
    """A service's process, kept running. Its output is appended to a file.

    `num_starts` counts them; `pid` is that of the present process, 0 between two.
    """

    def __init__(self, name: str, command: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.num_starts = 0
        self._command = tuple(command)
        self._log_path = log_path
        self._log: TextIO | None = None
        self._child: Child | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None and self._child.is_running else 0

    def start(self) -> None:
        self._log = self._log_path.open("a", encoding="utf-8")
        self._keeper = asyncio.create_task(self._keep_running(), name=self.name)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL: afterwards nothing of it is left."""
        self._stopping = True
        if self._child is not None:
            self.send(signal.SIGCONT)
            self._child.terminate()
        if self._keeper is None:
            return
        _, late = await asyncio.wait((self._keeper,), timeout=_STOP_SECONDS)
        if late and self._child is not None:
            self._child.kill()
        await asyncio.gather(self._keeper, return_exceptions=True)

    def kill(self) -> None:
        """The end, without a restart."""
        self._stopping = True
        if self._child is not None:
            self._child.kill()

    def send(self, number: signal.Signals) -> None:
        """Sends the present process a signal; after SIGKILL or SIGTERM it is started again."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def tail(self) -> str:
        """The end of the log."""
        lines = self._log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"  {self.name}| {line}" for line in lines)

    async def _keep_running(self) -> None:
        while not self._stopping:
            self._child = await Child.start(self._command, self._write)
            self.num_starts += 1
            self._write(f"--- start {self.num_starts}, pid {self._child.pid}, {time.time():.3f}")
            if self._stopping:
                self._child.kill()
            code = await self._child.wait()
            self._write(f"--- ended with {code}, {time.time():.3f}")
            if not self._stopping:
                await asyncio.sleep(_RESTART_DELAY_SECONDS)

    def _write(self, line: str) -> None:
        if self._log is not None and not self._log.closed:
            print(line, file=self._log, flush=True)
