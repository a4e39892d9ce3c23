"""One child process: its own process group, its output as lines, gone when the launcher is gone."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Self

_PR_SET_PDEATHSIG: Final = 1
_MAX_LINE_BYTES: Final = 1 << 16
_NUM_LAST_LINES: Final = 50
# Loaded before any fork: between fork and exec nothing may be imported.
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


class Child:
    """A running process. `start` makes it; whoever starts it awaits `wait`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        transport: asyncio.BaseTransport,
        on_line: Callable[[str], None],
    ) -> None:
        self._process = process
        self._transport = transport
        self.pid = process.pid
        self.started_at = time.time()
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._pump = asyncio.create_task(self._read_lines(output, on_line))

    @classmethod
    async def start(cls, command: Sequence[str], on_line: Callable[[str], None]) -> Self:
        """Runs `command`; `on_line` gets each line of its stdout and stderr. Raises OSError."""
        loop = asyncio.get_running_loop()
        read_end, write_end = os.pipe()
        output = asyncio.StreamReader()
        # A pipe of our own, since asyncio's would let a grandchild that keeps it open delay wait().
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb", buffering=0)
        )
        launcher = os.getpid()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                # Ctrl-C in the terminal reaches the launcher only, which then drains in order.
                process_group=0,
                preexec_fn=lambda: _die_with(launcher),
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            transport.close()
            raise
        finally:
            os.close(write_end)
        return cls(process, output, transport, on_line)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Waits for the end of the process and of its output; negative: the signal that ended it.

        Whatever the process itself had started is ended with it.
        """
        try:
            code = await self._process.wait()
            self._signal_group(signal.SIGKILL)
            await self._pump
        finally:
            self._pump.cancel()
            self._transport.close()
        return code

    def terminate(self) -> None:
        """Asks the process to drain and end. Its own children are its business."""
        if self.is_running:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process, and all that it started, at once."""
        if self.is_running:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def _read_lines(
        self, output: asyncio.StreamReader, on_line: Callable[[str], None]
    ) -> None:
        pending = b""
        while chunk := await output.read(_MAX_LINE_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                lines.append(pending)
                pending = b""
            for line in lines:
                self._emit(line, on_line)
        if pending:
            self._emit(pending, on_line)

    def _emit(self, line: bytes, on_line: Callable[[str], None]) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.last_lines.append(text)
        on_line(text)


def _die_with(launcher: int) -> None:
    """Runs in the child before exec: the kernel kills the child when the launcher dies."""
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The launcher may have died before the line above took effect.
    if os.getppid() != launcher:
        os._exit(1)
