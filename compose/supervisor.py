"""Keeps the services of a line running: restarts the crashed, stops all in order."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from compose.child import Child
from compose.line_log import LineLog

# The exit code of protos/wire/service.py for a cause that a restart does not mend. Written again
# here because importing it would load gRPC into every `tokenline` command.
EXIT_CANNOT_START: Final = 78
_FIRST_DELAY_SECONDS: Final = 0.25
_LONGEST_DELAY_SECONDS: Final = 10.0
# A service that ran this long had really started: its next crash is a new story.
_STEADY_SECONDS: Final = 30.0
_MAX_CRASHES_BEFORE_READY: Final = 4


@dataclass(frozen=True)
class ServiceSpec:
    """One process of the line. `name` is unique; `address` is host:port.

    `settings_check` is a command that checks the settings of `command` and starts nothing, where
    there is one. Lines of output that hold one of the texts of `noise` are not shown.
    """

    name: str
    command: tuple[str, ...]
    address: str
    settings_check: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()

    @property
    def service(self) -> str:
        """What the process is a replica of."""
        return self.name.partition("-")[0]


@dataclass
class Service:
    """A service and its present process, if any."""

    spec: ServiceSpec
    child: Child | None = None
    num_restarts: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs services from `async with` to its end. Nothing of them is left behind.

    `stop_order` groups the services: `drain` stops one group after the other. `on_change` is called
    whenever a process was started.
    """

    def __init__(
        self,
        stop_order: Sequence[Sequence[ServiceSpec]],
        log: LineLog,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._groups = [[Service(spec) for spec in group] for group in stop_order]
        self._log = log
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._was_ready = False

    @property
    def services(self) -> list[Service]:
        return [service for group in self._groups for service in group]

    async def __aenter__(self) -> Self:
        # The last to stop is the first to start: what others connect to comes first.
        for service in reversed(self.services):
            name = service.spec.name
            self._tasks[name] = asyncio.create_task(self._keep_running(service), name=name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        await asyncio.gather(*self._tasks.values())

    async def wait_for_failure(self) -> str:
        """Returns the cause, in one line, once a service cannot start and no restart will help."""
        return await asyncio.shield(self._failure)

    def mark_ready(self) -> None:
        """Every service has started well: from now on crashes are always met by a restart."""
        self._was_ready = True

    async def drain(self, grace_seconds: float) -> None:
        """Asks each group in turn to finish its work; kills what is still there after the grace."""
        for group in self._groups:
            for service in group:
                service.stopping.set()
                if service.child is not None:
                    service.child.terminate()
            tasks = {self._tasks[service.spec.name]: service for service in group}
            if not tasks:
                continue
            _, late = await asyncio.wait(tasks, timeout=grace_seconds)
            for task in late:
                service = tasks[task]
                self._log.write(service.spec.name, f"still busy after {grace_seconds:g} s: killed")
                if service.child is not None:
                    service.child.kill()
            await asyncio.gather(*tasks)

    def kill(self) -> None:
        """Ends every process at once."""
        for service in self.services:
            service.stopping.set()
            if service.child is not None:
                service.child.kill()

    async def _keep_running(self, service: Service) -> None:
        try:
            await self._restart_until_stopped(service)
        except Exception as error:
            self._fail(f"{service.spec.name} cannot be run: {type(error).__name__}: {error}")

    async def _restart_until_stopped(self, service: Service) -> None:
        name = service.spec.name
        num_crashes = 0
        while not service.stopping.is_set():
            started = time.monotonic()
            child = await Child.start(service.spec.command, lambda line: self._show(service, line))
            service.child = child
            if service.stopping.is_set():
                child.kill()
            self._on_change()
            code = await child.wait()
            service.child = None
            if service.stopping.is_set():
                return
            if time.monotonic() - started >= _STEADY_SECONDS:
                num_crashes = 0
            num_crashes += 1
            cause = self._final_cause(name, child, code, num_crashes)
            if cause:
                self._fail(cause)
                return
            delay = min(_FIRST_DELAY_SECONDS * 2 ** (num_crashes - 1), _LONGEST_DELAY_SECONDS)
            self._log.write(name, f"{describe_exit(code)}; starting it again in {delay:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(service.stopping.wait(), delay)
            service.num_restarts += 1

    def _show(self, service: Service, line: str) -> None:
        if not any(text in line for text in service.spec.noise):
            self._log.write(service.spec.name, line)

    def _final_cause(self, name: str, child: Child, code: int, num_crashes: int) -> str:
        """Why a restart will not help, in one line; empty when it may."""
        if code == EXIT_CANNOT_START:
            return _start_up_cause(name, child)
        if self._was_ready:
            return ""
        if code == -signal.SIGKILL:
            return (
                f"{name} was killed while it started: the usual cause is too little memory; "
                "lower --kv-memory, or take a smaller model"
            )
        if num_crashes > _MAX_CRASHES_BEFORE_READY:
            lines = [line for line in child.last_lines if line.strip()]
            last = f": {lines[-1].strip()}" if lines else ""
            return f"{name} crashed {num_crashes} times while it started{last}"
        return ""

    def _fail(self, cause: str) -> None:
        if not self._failure.done():
            self._failure.set_result(cause)


def describe_exit(code: int) -> str:
    """ "crashed with exit code 1", "was killed by SIGKILL", for a process's return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _start_up_cause(name: str, child: Child) -> str:
    marker = ": cannot start: "
    for line in reversed(child.last_lines):
        _, found, cause = line.partition(marker)
        if found:
            return f"{name} cannot start: {cause}"
    return f"{name} cannot start; its log above says why"
