"""A real Valkey server for tests, which can be killed and started again on its port."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from compose.embedded_redis import server_executable
from tests.fakes.ports import free_port

_DEADLINE_SECONDS = 20.0


class Valkey:
    """A server process on loopback. A context manager: inside it, the server answers."""

    def __init__(
        self, directory: Path, arguments: Sequence[str] = (), *, is_sentinel: bool = False
    ) -> None:
        self.port = free_port()
        self._directory = directory
        self._arguments = tuple(arguments)
        if not is_sentinel:
            self._arguments += ("--save", "", "--appendonly", "no")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(str(server_executable()), *self._arguments),
                *("--bind", "127.0.0.1", "--port", str(self.port)),
                *("--dir", str(self._directory)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not self._answers():
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL: nothing is kept."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It holds its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
