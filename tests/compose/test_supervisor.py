"""Services are restarted when they crash, stopped in order, and never outlive the launcher."""

import asyncio
import dataclasses
import io
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from compose.line_log import LineLog
from compose.supervisor import EXIT_CANNOT_START, ServiceSpec, Supervisor, describe_exit
from protos.wire import service as wire_service
from tests.fakes.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SERVE = "import signal; print('up', flush=True); signal.pause()"


def spec(name: str, code: str) -> ServiceSpec:
    command = (sys.executable, "-c", textwrap.dedent(code))
    return ServiceSpec(name, command, "127.0.0.1:1")


class Log:
    """A LineLog that is kept, with the lines written so far."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.log = LineLog(Console(file=self._file, width=200), [])

    @property
    def lines(self) -> list[str]:
        return self._file.getvalue().splitlines()

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines)


async def run_one(code: str, log: Log) -> str:
    """Runs one service until it is given up; returns the cause."""
    async with Supervisor([[spec("a", code)]], log.log) as supervisor:
        return await asyncio.wait_for(supervisor.wait_for_failure(), 30)


async def test_noise_is_not_shown() -> None:
    log = Log()
    code = "import sys; print('one\\nWARNING: noise!\\ntwo'); sys.exit(78)"
    noisy = dataclasses.replace(spec("a", code), noise=("noise!",))
    async with Supervisor([[noisy]], log.log) as supervisor:
        await asyncio.wait_for(supervisor.wait_for_failure(), 30)
    assert log.lines == ["a | one", "a | two"]


async def test_output_is_logged_line_by_line() -> None:
    log = Log()
    code = (
        "import sys; print('one\\ntwo'); sys.stderr.write('x' * 200_000 + '\\nlast'); sys.exit(78)"
    )
    await run_one(code, log)
    assert log.lines[:2] == ["a | one", "a | two"]
    assert sum(line.count("x") for line in log.lines) == 200_000
    assert log.lines[-1] == "a | last"


async def test_a_start_up_failure_is_final_and_its_cause_is_one_line() -> None:
    log = Log()
    code = "import sys; sys.stderr.write('a: cannot start: port 1 is taken\\n'); sys.exit(78)"
    assert await run_one(code, log) == "a cannot start: port 1 is taken"
    assert log.count("starting it again") == 0


def test_the_code_of_a_start_up_failure_is_the_services() -> None:
    assert EXIT_CANNOT_START == wire_service.EXIT_CANNOT_START


async def test_a_crash_loop_before_the_line_is_ready_is_given_up() -> None:
    log = Log()
    cause = await run_one("raise ValueError('bad weights')", log)
    assert cause == "a crashed 5 times while it started: ValueError: bad weights"
    assert log.count("starting it again") == 4


async def test_being_killed_before_the_line_is_ready_points_to_memory() -> None:
    cause = await run_one("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Log())
    assert "memory" in cause
    assert "--kv-memory" in cause


async def test_a_program_that_does_not_exist_is_a_cause() -> None:
    missing = ServiceSpec("a", ("/nowhere/program",), "127.0.0.1:1")
    async with Supervisor([[missing]], Log().log) as supervisor:
        cause = await asyncio.wait_for(supervisor.wait_for_failure(), 30)
    assert "/nowhere/program" in cause


async def test_a_killed_service_is_restarted_and_counted() -> None:
    log = Log()
    changes: list[int] = []
    supervisor = Supervisor([[spec("a", SERVE)]], log.log, lambda: changes.append(1))
    async with supervisor:
        service = supervisor.services[0]
        await until(lambda: log.count("| up") == 1)
        supervisor.mark_ready()
        assert service.child is not None
        first = service.child.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: log.count("| up") == 2)
        assert service.num_restarts == 1
        assert service.child.pid != first
        assert log.count("was ended by SIGKILL; starting it again") == 1
        assert len(changes) == 2


async def test_restarts_back_off() -> None:
    log = Log()
    async with Supervisor([[spec("a", "raise SystemExit(1)")]], log.log) as supervisor:
        supervisor.mark_ready()
        await until(lambda: log.count("starting it again") == 3)
    delays = [line.rpartition(" in ")[2] for line in log.lines if "again" in line]
    assert delays == ["0.25 s", "0.5 s", "1 s"]


async def test_groups_drain_one_after_the_other(tmp_path: Path) -> None:
    log = Log()
    # On SIGTERM each waits until the others of its group have been told too.
    code = """
        import pathlib, signal, sys
        def stop(*_):
            print("draining", flush=True)
            meeting = pathlib.Path({directory!r}, {group!r})
            (meeting / {name!r}).touch()
            while len(list(meeting.iterdir())) < {size}:
                pass
            print("drained", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("up", flush=True)
        while True:
            signal.pause()
    """
    groups = []
    for group, names in {"g1": ["a"], "g2": ["b-1", "b-2"], "g3": ["c"]}.items():
        (tmp_path / group).mkdir()
        values = {"directory": str(tmp_path), "group": group, "size": len(names)}
        groups.append([spec(name, code.format(name=name, **values)) for name in names])
    async with Supervisor(groups, log.log) as supervisor:
        await until(lambda: log.count("| up") == 4)
        await supervisor.drain(10)
        assert all(service.child is None for service in supervisor.services)
    events = [line.partition(" | ")[0].partition("-")[0] for line in log.lines if "drain" in line]
    assert events == ["a"] * 2 + ["b"] * 4 + ["c"] * 2


async def test_what_does_not_drain_is_killed_after_its_grace() -> None:
    log = Log()
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
    async with Supervisor([[spec("a", code + "signal.pause()")]], log.log) as supervisor:
        await until(lambda: log.count("| up") == 1)
        await supervisor.drain(0.2)
    assert log.count("still busy after 0.2 s: killed") == 1


async def test_draining_does_not_wait_for_a_restart_that_is_due() -> None:
    log = Log()
    starts: list[int] = []
    crashing = spec("a", "raise SystemExit(1)")
    async with Supervisor([[crashing]], log.log, lambda: starts.append(1)) as supervisor:
        supervisor.mark_ready()
        await until(lambda: log.count("again in 1 s") == 1)
        await supervisor.drain(30)
    assert len(starts) == 3


async def test_leaving_kills_all_and_their_children() -> None:
    log = Log()
    code = """
        import signal, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print("child", child.pid, flush=True)
        signal.pause()
    """
    async with Supervisor([[spec("a", code)]], log.log):
        await until(lambda: log.count("child") == 1)
        grandchild = int(log.lines[0].split()[-1])
    # The signal has been sent; the kernel carries it out in its own time.
    await until(lambda: has_ended(grandchild))


def has_ended(pid: int) -> bool:
    """Also true of a process whose parent has not asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help exists on Linux only")
async def test_services_die_with_the_launcher() -> None:
    launcher_code = """
        import asyncio, sys
        from rich.console import Console
        from compose.line_log import LineLog
        from compose.supervisor import ServiceSpec, Supervisor

        async def run():
            code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
            spec = ServiceSpec("a", (sys.executable, "-c", code), "127.0.0.1:1")
            async with Supervisor([[spec]], LineLog(Console(), [])) as supervisor:
                await supervisor.wait_for_failure()

        asyncio.run(run())
    """
    with subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(launcher_code)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        service = int(launcher.stdout.readline().split()[-1])
        assert psutil.pid_exists(service)
        launcher.kill()
        launcher.wait()
        await until(lambda: has_ended(service))


def test_exit_codes_are_told_in_words() -> None:
    assert describe_exit(0) == "ended with exit code 0"
    assert describe_exit(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert describe_exit(-1000) == "was ended by signal 1000"
