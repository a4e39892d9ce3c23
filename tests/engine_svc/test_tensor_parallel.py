"""An engine of several ranks as processes: it serves, and ends whole, whichever part of it ends."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_svc.__main__ import EXIT_HANGS
from engine_svc.lost_rank import EXIT_LOST_RANK
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.multiplex_client import StreamClient
from protos.wire.stream_adapter import engine_adapter
from tests.fakes.engine_process import START_SECONDS, engine_process, ready_address, start_failure
from tests.fakes.engine_server import proto_sampling
from tests.fakes.tiny_models import write_tiny_llama
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow

NUM_TOKENS = 200


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model_for_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    return write_tiny_llama(tmp_path_factory.mktemp("for_three"), **heads)


@dataclass
class Engine:
    """An engine in the middle of a sequence, and the processes of its other ranks."""

    process: asyncio.subprocess.Process
    ranks: list[psutil.Process]
    outputs: "asyncio.Task[list[engine_pb2.Output]]"

    @property
    def rank(self) -> psutil.Process:
        """The last one."""
        return self.ranks[-1]

    async def ended(self) -> tuple[int, str]:
        return await ended(self.process, self.ranks)


async def ended(
    process: asyncio.subprocess.Process, ranks: Sequence[psutil.Process]
) -> tuple[int, str]:
    """An engine's exit code and stderr, which it shared with its ranks: so they have ended too."""
    _, stderr = await asyncio.wait_for(process.communicate(), START_SECONDS)
    await until(lambda: not any(map(_is_there, ranks)), "the end of the ranks")
    assert process.returncode is not None
    return process.returncode, stderr.decode()


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def flags(model: Path, num_ranks: int) -> list[str]:
    return [
        *("--model", str(model), "--port", "0", "--kv-memory", "4MiB", "--device", "cpu"),
        *("--tensor-parallel", str(num_ranks), "--dtype", "float32"),
    ]


def ranks_of(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    """In their order."""
    ranks = psutil.Process(process.pid).children()
    return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))


def _imports_torch(process: psutil.Process) -> bool:
    return any("libtorch" in each.path for each in process.memory_maps())


@asynccontextmanager
async def busy_engine(model: Path, *arguments: str, num_ranks: int = 2) -> AsyncIterator[Engine]:
    """An engine of several ranks that has sampled some tokens of a long sequence."""
    async with engine_process(*flags(model, num_ranks), *arguments) as process:
        address = await ready_address(process)
        ranks = ranks_of(process)
        assert len(ranks) == num_ranks - 1
        async with open_channel(address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            client: StreamClient[Any, Any] = StreamClient(
                stub.Generate, engine_adapter(), lost_code="engine_lost"
            )
            begun = asyncio.Event()

            async def collect() -> list[engine_pb2.Output]:
                record = common_pb2.GenerationRecord(
                    prompt_token_ids=[1, 2, 3], sampling=proto_sampling(NUM_TOKENS)
                )
                collected = []
                async with client.open(engine_pb2.Submit(record=record)) as outputs:
                    async for output in outputs:
                        collected.append(output)
                        if output.token_ids:
                            begun.set()
                return collected

            async with client:
                collecting = asyncio.create_task(collect())
                await asyncio.wait_for(begun.wait(), START_SECONDS)
                yield Engine(process, ranks, collecting)
                collecting.cancel()


async def test_it_drains_when_all_its_processes_are_told_to_end(model_path: Path) -> None:
    async with busy_engine(model_path, "--drain-seconds", str(START_SECONDS)) as engine:
        # As a terminal, or an init system, tells a whole group.
        engine.rank.send_signal(signal.SIGINT)
        engine.rank.send_signal(signal.SIGTERM)
        engine.process.send_signal(signal.SIGTERM)
        outputs = await asyncio.wait_for(engine.outputs, START_SECONDS)
        assert outputs[-1].finish.reason == common_pb2.FINISH_REASON_LENGTH
        assert sum(len(output.token_ids) for output in outputs) == NUM_TOKENS
        assert (await engine.ended())[0] == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_it_ends_with_a_line_when_a_rank_is_killed_and_gives_its_sequences_back(
    model_path: Path, model_for_three: Path, num_ranks: int
) -> None:
    model = model_for_three if num_ranks == 3 else model_path
    async with busy_engine(model, num_ranks=num_ranks) as engine:
        engine.rank.kill()
        outputs = await asyncio.wait_for(engine.outputs, START_SECONDS)
        assert outputs[-1].finish.error.code == "engine_lost"
        code, errors = await engine.ended()
        assert code == EXIT_LOST_RANK
        (line,) = [line for line in errors.splitlines() if "CRITICAL" in line]
        assert line.endswith(
            f"rank {num_ranks - 1} (process {engine.rank.pid}) was ended by SIGKILL: this engine "
            "ends, its sequences go on elsewhere, and its supervisor restarts it"
        )
        assert "Traceback" not in errors


async def test_its_ranks_end_when_it_is_killed(model_path: Path) -> None:
    async with busy_engine(model_path) as engine:
        engine.process.kill()
        assert (await engine.ended())[0] == -signal.SIGKILL


async def test_it_ends_when_a_rank_hangs_and_that_rank_too(model_path: Path) -> None:
    async with busy_engine(model_path, "--step-timeout-seconds", "1") as engine:
        engine.rank.suspend()
        outputs = await asyncio.wait_for(engine.outputs, START_SECONDS)
        assert outputs[-1].finish.error.code == "engine_lost"
        code, errors = await engine.ended()
        assert code == EXIT_HANGS
        assert "the engine hangs" in errors


async def test_idle_ones_end_with_a_rank_too(model_path: Path) -> None:
    async with engine_process(*flags(model_path, 2)) as process:
        await ready_address(process)
        ranks = ranks_of(process)
        ranks[0].kill()
        code, errors = await ended(process, ranks)
        assert code == EXIT_LOST_RANK
        assert "was ended by SIGKILL" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_ends_whole_when_all_its_processes_are_told_to_end_as_they_start(
    model_for_three: Path, number: signal.Signals
) -> None:
    async with engine_process(*flags(model_for_three, 3)) as process:
        await until(lambda: len(ranks_of(process)) == 2, "the start of the ranks")
        ranks = ranks_of(process)
        await until(lambda: all(map(_imports_torch, ranks)), "that the ranks import torch")
        for each in (*ranks, process):
            each.send_signal(number)
        code, errors = await ended(process, ranks)
        assert code == 0
        assert "Traceback" not in errors


# `python -m engine_svc` whose other ranks never end loading.
_LOADING_ENGINE = """
import engine_svc.__main__ as main
from engine_svc.compute import parallel_processes
from engine_svc.settings import Settings
from protos.wire.service import run_main

parallel_processes._MODULE = "tests.fakes.failing_rank"
run_main("engine_svc", Settings, main.serve)
"""


async def test_it_ends_whole_when_it_is_told_to_while_it_loads(model_for_three: Path) -> None:
    async with engine_process(
        *flags(model_for_three, 3), program=("-c", _LOADING_ENGINE), FAILING_RANK="hang"
    ) as process:
        assert process.stderr is not None
        line = b""
        # All have met by then; until all have loaded, each waits for the others.
        while b"3 ranks, of which this is the first" not in line:
            line = await asyncio.wait_for(process.stderr.readline(), START_SECONDS)
            assert line
        ranks = ranks_of(process)
        assert len(ranks) == 2
        process.send_signal(signal.SIGTERM)
        code, errors = await ended(process, ranks)
        assert code == 0
        assert "stopped while the model was loaded" in errors
        assert "Traceback" not in errors


async def test_it_says_in_one_line_why_ranks_cannot_share_a_model(model_path: Path) -> None:
    line = await start_failure(
        *("--model", str(model_path), "--port", "0", "--tensor-parallel", "3", "--device", "cpu")
    )
    assert "cannot start: 3 ranks cannot share a model with 4 heads over 2 KV heads" in line
