"""`python -m engine_svc` as a test starts it, and what it says on its stderr."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

START_SECONDS = 60


@asynccontextmanager
async def engine_process(
    *arguments: str, program: Sequence[str] = ("-m", "engine_svc"), **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m engine_svc` with these arguments; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, *arguments),
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready_address(process: asyncio.subprocess.Process) -> str:
    """Where it serves, once it says so in its log."""
    assert process.stderr is not None
    lines = []
    while line := (await asyncio.wait_for(process.stderr.readline(), START_SECONDS)).decode():
        lines.append(line)
        if match := re.search(r"ready on (\S+)", line):
            return match[1]
    raise AssertionError(f"the engine ended before it was ready: {''.join(lines)}")


async def start_failure(*arguments: str) -> str:
    """The one line with which a process that cannot start ends."""
    async with engine_process(*arguments) as process:
        _, stderr = await asyncio.wait_for(process.communicate(), START_SECONDS)
        assert process.returncode == 78
        return stderr.decode().strip().splitlines()[-1]
