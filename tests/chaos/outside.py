"""Must-show 4 and 5: hostile clients and overload, which have programs of their own."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tests.chaos.report import Table


async def run_program(
    name: str, module: Sequence[str], timeout_seconds: float, say: Callable[[str], None]
) -> Table:
    """Runs a module of the tests, whose output is told as it comes; good when it exits with 0."""
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *module),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(timeout_seconds):
            assert process.stdout is not None
            async for line in process.stdout:
                say(f"  {line.decode(errors='replace').rstrip()}")
            code = await process.wait()
    except TimeoutError:
        code = -1
    finally:
        await _end(process)
    table = Table("program exit_code seconds", "its own table stands above")
    table.add(name, code, f"{time.monotonic() - started:.0f}", is_good=code == 0)
    return table


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupts the program, so that it ends what it has started, and waits for it."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), 20.0)
    except TimeoutError:
        process.kill()
        await process.wait()
