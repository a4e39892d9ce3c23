"""Runs a whole line as local processes: starts it, waits until it is ready, stops it in order."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from compose.errors import CommandError
from compose.line import Line, LineOptions, build_line
from compose.line_log import LineLog
from compose.memory_check import require_memory
from compose.ports import free_ports, require_free
from compose.readiness import Readiness, wait_until_ready
from compose.settings_check import require_good_settings
from compose.state_file import ServiceState, StateFile
from compose.supervisor import Supervisor
from compose.welcome import print_welcome

# Longer than the 30 s that a gateway gives the requests in progress (its --drain-seconds).
_GRACE_SECONDS: Final = 40.0
_UNREADY_GRACE_SECONDS: Final = 2.0


async def run_line(options: LineOptions, console: Console, state_directory: Path) -> bool:
    """Runs until SIGINT or SIGTERM, then drains; a second signal ends everything at once.

    Returns whether every service could finish its work. Raises CommandError when the line cannot
    start, or cannot go on.
    """
    for port in options.gateway_ports:
        require_free(options.host, port)
    require_memory(options.model_path, options.num_engines)
    internal_ports = free_ports(options.num_internal_ports, excluding=options.gateway_ports)
    line = build_line(options, internal_ports)
    require_good_settings(line.specs, os.environ)
    log = LineLog(console, [spec.name for spec in line.specs])
    state_file = StateFile(state_directory, options.model_path.name, line.gateway_urls)

    def describe() -> None:
        try:
            state_file.write(_service_states(supervisor))
        except CommandError as error:
            # The line serves on; only `tokenline ps` is behind.
            console.print(str(error), style="yellow", markup=False, soft_wrap=True)

    supervisor = Supervisor(line.stop_order, log, on_change=describe)
    try:
        state_file.write(())
        async with _stop_signals(supervisor) as stop, supervisor:
            await _run_until_stopped(line, supervisor, stop.first, console)
            return not stop.second.is_set()
    finally:
        state_file.remove()


async def _run_until_stopped(
    line: Line, supervisor: Supervisor, stop: asyncio.Event, console: Console
) -> None:
    started = time.monotonic()
    failure = asyncio.create_task(supervisor.wait_for_failure())
    stopped = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(_show_readiness(line, console))
    try:
        await asyncio.wait({failure, stopped, ready}, return_when=asyncio.FIRST_COMPLETED)
        was_ready = ready.done()
        ready.cancel()
        if was_ready and not failure.done() and not stopped.done():
            supervisor.mark_ready()
            print_welcome(line, await ready, time.monotonic() - started, console)
            await asyncio.wait({failure, stopped}, return_when=asyncio.FIRST_COMPLETED)
        console.print("stopping: each service finishes its work, Ctrl-C again ends it at once")
        # A line that never was ready has no work to finish, and may be loading a large model.
        await supervisor.drain(_GRACE_SECONDS if was_ready else _UNREADY_GRACE_SECONDS)
        if failure.done():
            raise CommandError(await failure)
        console.print("stopped")
    finally:
        tasks = {failure, stopped, ready}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _show_readiness(line: Line, console: Console) -> Readiness:
    """Waits for the line, showing what it waits for."""
    urls, num_replicas = line.gateway_urls, line.num_replicas
    if not console.is_terminal:
        return await wait_until_ready(
            urls,
            num_replicas,
            lambda status: console.print(status, soft_wrap=True, markup=False),
        )
    with console.status("starting") as spinner:
        return await wait_until_ready(urls, num_replicas, spinner.update)


@dataclass(frozen=True)
class _Stop:
    """Set by the first and by the second signal to stop."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def _stop_signals(supervisor: Supervisor) -> AsyncIterator[_Stop]:
    """Notes SIGINT, SIGTERM and SIGHUP; the second one kills the services."""
    stop = _Stop()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.first.is_set():
            stop.second.set()
            supervisor.kill()
        stop.first.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    # Under nohup the line outlives its terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _service_states(supervisor: Supervisor) -> list[ServiceState]:
    return [
        ServiceState(
            name=service.spec.name,
            pid=service.child.pid,
            address=service.spec.address,
            num_restarts=service.num_restarts,
        )
        for service in supervisor.services
        if service.child is not None
    ]
