"""The servers that are compared, each started the way its makers would for the load at hand."""

import json
import shlex
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.lines import start_line
from tests.bench.processes import Processes
from tests.fakes.ports import free_port

OURS = "tokenline"
_READY_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a server must hold: `streams` at once, of `context` tokens each."""

    streams: int
    context: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server by name. `start` starts it and returns the port of its OpenAI-compatible API.

    same_file: it computes with the file that this project serves.
    """

    name: str
    start: Callable[[Processes, Shape], int]
    same_file: bool


@dataclass(frozen=True, slots=True)
class Running:
    """A contestant that answers."""

    contestant: Contestant
    port: int
    model_name: str
    processes: Processes

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far."""
        times = [process.cpu_times() for process in self._tree()]
        return sum(time.user + time.system for time in times)

    def memory_mib(self) -> tuple[float, float]:
        """Resident memory, counting shared pages in each process (RSS) and once in all (PSS)."""
        infos = [process.memory_full_info() for process in self._tree()]
        return sum(info.rss for info in infos) / (1 << 20), sum(i.pss for i in infos) / (1 << 20)

    def _tree(self) -> list[psutil.Process]:
        parents = [psutil.Process(pid) for pid in self.processes.pids.values()]
        return parents + [child for one in parents for child in one.children(recursive=True)]


@contextmanager
def running(
    contestant: Contestant,
    shape: Shape,
    log_path: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Starts a contestant, waits until it answers, and ends it at the end.

    environment: variables that all of its processes have beside this one's.
    RuntimeError, with the end of its log, when it does not come up.
    """
    with Processes(log_path, environment) as processes:
        port = contestant.start(processes, shape)
        deadline = time.monotonic() + _READY_SECONDS
        while (model_name := _model_that_answers(port)) is None:
            processes.check_alive()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{contestant.name} did not come up; its log ends:\n{processes.log_tail()}"
                )
            time.sleep(0.2)
        yield Running(contestant, port, model_name, processes)


def ours(model: Path, engine_flags: Sequence[str]) -> Contestant:
    """The whole line with its defaults, but for the threads and what `engine_flags` say."""

    def start(processes: Processes, shape: Shape) -> int:
        port = free_port()
        flags = ["--model", str(model), "--port", str(port)]
        flags += ["--num-threads", str(shape.num_threads), *engine_flags]
        return start_line(processes, model, ["engine_svc", *flags], port)

    return Contestant(OURS, start, same_file=True)


def llama_server(program: str, model: Path, name: str, same_file: bool) -> Contestant:
    """llama.cpp's server, with as many slots as streams, each with room for the context."""

    def start(processes: Processes, shape: Shape) -> int:
        port = free_port()
        command = [program, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", str(shape.num_threads)]
        command += ["--threads-batch", str(shape.num_threads)]
        command += ["--parallel", str(shape.streams)]
        command += ["--ctx-size", str(shape.streams * shape.context)]
        processes.start_program(name, command)
        return port

    return Contestant(name, start, same_file)


def other_server(name: str, command: str) -> Contestant:
    """Any server with /v1/models and /v1/completions; its command has {port}, and may have
    {threads}, {streams} and {context}."""

    def start(processes: Processes, shape: Shape) -> int:
        port = free_port()
        values = {"streams": shape.streams, "context": shape.context}
        values |= {"port": port, "threads": shape.num_threads, "python": sys.executable}
        processes.start_program(name, [part.format(**values) for part in shlex.split(command)])
        return port

    return Contestant(name, start, same_file=False)


def _model_that_answers(port: int) -> str | None:
    """The name of the model, once a first request has been answered."""
    try:
        models = _ask(f"http://127.0.0.1:{port}/v1/models", None)
        name = str(models["data"][0]["id"])  # type: ignore[index]
        body = {"model": name, "prompt": "Hello", "max_tokens": 1}
        _ask(f"http://127.0.0.1:{port}/v1/completions", body)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return name


def _ask(url: str, body: dict[str, object] | None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        decoded: dict[str, object] = json.load(answer)
    return decoded
