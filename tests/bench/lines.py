"""Starts the line for a benchmark, with a real engine or a scripted one."""

from pathlib import Path

from compose.embedded_redis import server_command
from protos.wire.model_files import fingerprint, model_name
from tests.bench.processes import Processes
from tests.fakes.ports import free_port


def start_line(processes: Processes, model: Path, engine: list[str], engine_port: int) -> int:
    """Starts every service around the engine command `engine`; returns the gateway's port."""
    redis, tokenizer, detok, gateway = (free_port() for _ in range(4))
    processes.start_program("redis", server_command("127.0.0.1", redis))
    processes.start("engine", engine)
    processes.start("tokenizer", ["tokenizer_svc", "--model", str(model), "--port", str(tokenizer)])
    processes.start(
        "detok", ["detok_svc", "--tokenizer", f"127.0.0.1:{tokenizer}", "--port", str(detok)]
    )
    processes.start(
        "gateway",
        [
            "gateway",
            *("--port", str(gateway)),
            *("--tokenizer", f"127.0.0.1:{tokenizer}"),
            *("--detok", f"127.0.0.1:{detok}"),
            *("--engine", f"127.0.0.1:{engine_port}"),
            *("--redis", f"redis://127.0.0.1:{redis}"),
        ],
    )
    processes.wait_ready(gateway)
    return gateway


def start_scripted_line(
    processes: Processes,
    model: Path,
    tokens_per_request: int,
    num_streams: int,
    step_seconds: float = 0.0,
) -> int:
    """A line whose engine emits fixed ids: as fast as they are read, or one a step.

    step_seconds: with it, the engine runs `num_streams` at once, and others wait.
    """
    port = free_port()
    engine = [
        "tests.fakes.scripted_engine",
        *("--port", str(port)),
        *("--tokens-per-request", str(tokens_per_request)),
        *("--max-num-seqs", str(num_streams)),
        *("--step-seconds", str(step_seconds)),
        *("--model-name", model_name(model)),
        *("--model-fingerprint", fingerprint(model)),
    ]
    return start_line(processes, model, engine, port)


def start_real_line(processes: Processes, model: Path, max_num_seqs: int) -> int:
    port = free_port()
    engine = [
        "engine_svc",
        *("--model", str(model)),
        *("--port", str(port)),
        *("--max-num-seqs", str(max_num_seqs)),
    ]
    return start_line(processes, model, engine, port)
