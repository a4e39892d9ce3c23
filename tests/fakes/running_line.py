"""Runs a whole line through the real launcher, as real processes, for tests."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from compose.state_file import LineState, ServiceState, running_lines

START_SECONDS = 120.0
STOP_SECONDS = 60.0
TOKENLINE = str(Path(sys.executable).with_name("tokenline"))


@dataclass
class RunningLine:
    """A launcher and what it started. `directory` holds its log and its state."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    @property
    def state(self) -> LineState:
        (state,) = running_lines(self.directory / "tokenline")
        return state

    @property
    def url(self) -> str:
        return self.state.gateway_urls[0]

    @property
    def redis_url(self) -> str:
        return f"redis://{self.service('redis').address}/0"

    @property
    def environment(self) -> dict[str, str]:
        """With it, `tokenline ps` and `tokenline chat` see this line and no other."""
        return line_environment(self.directory)

    def service(self, name: str) -> ServiceState:
        (found,) = [service for service in self.state.services if service.name == name]
        return found

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """The launcher's exit code, once it has ended."""
        return self.process.wait(STOP_SECONDS)


def line_environment(directory: Path) -> dict[str, str]:
    """The environment of a launcher whose state lies below `directory`."""
    inherited = {
        name: text for name, text in os.environ.items() if not name.startswith("TOKENLINE_")
    }
    return {**inherited, "XDG_RUNTIME_DIR": str(directory), "NO_COLOR": "1"}


@contextmanager
def start_launcher(directory: Path, *arguments: str) -> Iterator[RunningLine]:
    """`tokenline up --port 0 ARGUMENTS`, which is stopped at the end whatever state it is in."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            [TOKENLINE, "up", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=line_environment(directory),
        )
    line = RunningLine(process, directory)
    try:
        yield line
    finally:
        if process.poll() is None:
            line.interrupt()
            try:
                line.wait()
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running_line(directory: Path, *arguments: str) -> Iterator[RunningLine]:
    """As `start_launcher`, once the line is ready."""
    with start_launcher(directory, *arguments) as line:
        deadline = time.monotonic() + START_SECONDS
        while not re.search(r"Tokenline is ready at", line.output):
            assert line.process.poll() is None, f"the launcher ended:\n{line.output}"
            assert time.monotonic() < deadline, f"the line did not become ready:\n{line.output}"
            time.sleep(0.05)
        yield line


def living(pids: list[int]) -> list[int]:
    """Those of `pids` that still run; a process that only waits to be reaped does not."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found
