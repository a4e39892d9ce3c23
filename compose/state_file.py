"""How a running line describes itself to other commands: one small JSON file per launcher."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from compose.errors import CommandError


@dataclass(frozen=True)
class ServiceState:
    """One process of a line, at the time of its last start."""

    name: str
    pid: int
    address: str
    num_restarts: int


@dataclass(frozen=True)
class LineState:
    """A line: its launcher, where its gateways answer, and its processes."""

    launcher_pid: int
    launcher_started_at: float
    model: str
    gateway_urls: tuple[str, ...]
    services: tuple[ServiceState, ...]


class StateFile:
    """The file of this process's line; `remove` it when the line has stopped.

    The constructor and `write` raise CommandError where the place cannot be written to.
    """

    def __init__(self, directory: Path, model: str, gateway_urls: Sequence[str]) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _unusable(directory, error) from error
        self._path = directory / f"line-{os.getpid()}.json"
        self._model = model
        self._gateway_urls = tuple(gateway_urls)

    def write(self, services: Sequence[ServiceState]) -> None:
        """Replaces the file in one step, so that no reader sees half of it."""
        pid = os.getpid()
        state = LineState(
            launcher_pid=pid,
            launcher_started_at=psutil.Process(pid).create_time(),
            model=self._model,
            gateway_urls=self._gateway_urls,
            services=tuple(services),
        )
        unfinished = self._path.with_suffix(".tmp")
        try:
            unfinished.write_text(json.dumps(asdict(state)))
            unfinished.replace(self._path)
        except OSError as error:
            raise _unusable(self._path, error) from error

    def remove(self) -> None:
        # A place that has gone meanwhile holds no file either.
        with contextlib.suppress(OSError):
            self._path.unlink()


def running_lines(directory: Path) -> list[LineState]:
    """The lines that run now, oldest first. Files of launchers that were killed are removed."""
    lines = []
    for path in directory.glob("line-*.json"):
        state = _read(path)
        if state is None:
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            lines.append(state)
    return sorted(lines, key=lambda line: line.launcher_started_at)


def _unusable(path: Path, error: OSError) -> CommandError:
    return CommandError(
        f"cannot write to {path}: {error.strerror or error}; a running line is noted there: set "
        "XDG_RUNTIME_DIR or XDG_CACHE_HOME to a directory that can be written to"
    )


def _read(path: Path) -> LineState | None:
    """The state, or None when its launcher is gone or the file was written by another version."""
    try:
        fields = json.loads(path.read_text())
        services = tuple(ServiceState(**service) for service in fields.pop("services"))
        gateway_urls = tuple(fields.pop("gateway_urls"))
        state = LineState(**fields, services=services, gateway_urls=gateway_urls)
        created = psutil.Process(state.launcher_pid).create_time()
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None
    # Another process may have been given the launcher's number since.
    return state if abs(created - state.launcher_started_at) < 1.0 else None
