"""How a service process starts and how it is told to stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import uvloop

from protos.wire.errors import StartupError
from protos.wire.logs import configure_logging
from protos.wire.settings import load_settings

SettingsT = TypeVar("SettingsT")

# EX_CONFIG of sysexits.h. A supervisor does not restart a process that ends with it.
EXIT_CANNOT_START: Final = 78


def run_main(
    service: str,
    settings_class: type[SettingsT],
    serve: Callable[[SettingsT], Coroutine[Any, Any, None]],
) -> NoReturn:
    """Runs `serve` with settings from the command line and the environment, then exits.

    A StartupError becomes one line on stderr and exit code 78.
    """
    try:
        settings = load_settings(settings_class, service, sys.argv[1:], os.environ)
        configure_logging(service, getattr(settings, "log_level", "info"))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except StartupError as error:
        _refuse(service, error)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def check_main(service: str, settings_class: type[Any]) -> NoReturn:
    """Reads the settings as `run_main` does, says what is wrong with them, and exits.

    `python -m SERVICE.settings` runs it, with the flags of the service: it loads nothing of the
    service but its settings.
    """
    try:
        load_settings(settings_class, service, sys.argv[1:], os.environ)
    except StartupError as error:
        _refuse(service, error)
    sys.exit(0)


def _refuse(service: str, error: StartupError) -> NoReturn:
    sys.stderr.write(f"{service}: cannot start: {error}\n")
    sys.exit(EXIT_CANNOT_START)


def install_stop_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. Call it on the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
