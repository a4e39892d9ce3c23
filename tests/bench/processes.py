"""The processes of a benchmark: started on free ports, their CPU time read, stopped at the end."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent


class Processes:
    """Child processes by name. A context manager: leaving it ends them all.

    environment: variables that the children have beside this process's.
    """

    def __init__(self, log_path: Path, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {"PYTHONUNBUFFERED": "1", **(environment or {})}
        self._log = log_path.open("ab")
        self._log_path = log_path
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for child in reversed(self._children.values()):
            child.send_signal(signal.SIGTERM)
        for child in self._children.values():
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._log.close()

    def start(self, name: str, module: Sequence[str]) -> None:
        """Runs a module of this project, with its arguments."""
        self.start_program(name, [sys.executable, "-m", *module])

    def start_program(self, name: str, command: Sequence[str]) -> None:
        self._children[name] = subprocess.Popen(
            list(command),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **self._environment},
        )

    def wait_ready(self, gateway_port: int, timeout_seconds: float = 120.0) -> None:
        """Waits for the gateway's /readyz; raises RuntimeError when a child dies first."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{gateway_port}/readyz", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"the line did not become ready; the log's end:\n{self.log_tail()}")

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def check_alive(self) -> None:
        """RuntimeError, with the log's end, when a child has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise RuntimeError(f"{name} ended; the log's end:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-30:])

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each child so far, and of this process as `load generator`."""
        seconds = {}
        for name, child in self._children.items():
            times = psutil.Process(child.pid).cpu_times()
            seconds[name] = times.user + times.system
        own = psutil.Process().cpu_times()
        seconds["load generator"] = own.user + own.system
        return seconds

    def resident_mib(self) -> dict[str, float]:
        return {
            name: psutil.Process(child.pid).memory_info().rss / (1 << 20)
            for name, child in self._children.items()
        }
