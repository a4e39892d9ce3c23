"""An engine of two ranks as processes: it serves, and it ends whole, whichever part of it ends."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_svc.__main__ import EXIT_HANGS
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


@dataclass
class Engine:
    """An engine in the middle of a sequence, and the process of its rank 1."""

    process: asyncio.subprocess.Process
    rank: psutil.Process
    outputs: "asyncio.Task[list[engine_pb2.Output]]"

    async def ended(self) -> tuple[int, str]:
        """Its exit code and stderr, which it shared with its rank: so that has ended too."""
        _, stderr = await asyncio.wait_for(self.process.communicate(), START_SECONDS)
        await until(lambda: not _is_there(self.rank), "the end of the rank")
        assert self.process.returncode is not None
        return self.process.returncode, stderr.decode()


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def busy_engine(model: Path, *arguments: str) -> AsyncIterator[Engine]:
    """An engine of two ranks that has sampled some tokens of a long sequence."""
    async with engine_process(
        *("--model", str(model), "--port", "0", "--kv-memory", "4MiB", "--device", "cpu"),
        *("--tensor-parallel", "2", "--dtype", "float32", *arguments),
    ) as process:
        address = await ready_address(process)
        (rank,) = psutil.Process(process.pid).children()
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
                yield Engine(process, rank, collecting)
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


async def test_it_ends_with_an_error_when_a_rank_is_killed_and_gives_its_sequences_back(
    model_path: Path,
) -> None:
    async with busy_engine(model_path) as engine:
        engine.rank.kill()
        outputs = await asyncio.wait_for(engine.outputs, START_SECONDS)
        assert outputs[-1].finish.error.code == "engine_lost"
        code, errors = await engine.ended()
        assert code not in (0, 78)
        assert f"rank 1 (process {engine.rank.pid}) was ended by SIGKILL" in errors


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
    async with engine_process(
        *("--model", str(model_path), "--port", "0", "--kv-memory", "4MiB", "--device", "cpu"),
        *("--tensor-parallel", "2", "--dtype", "float32"),
    ) as process:
        await ready_address(process)
        (rank,) = psutil.Process(process.pid).children()
        rank.kill()
        _, errors = await asyncio.wait_for(process.communicate(), START_SECONDS)
        assert process.returncode not in (0, 78)
        assert b"was ended by SIGKILL" in errors


async def test_it_says_in_one_line_why_ranks_cannot_share_a_model(model_path: Path) -> None:
    line = await start_failure(
        *("--model", str(model_path), "--port", "0", "--tensor-parallel", "3", "--device", "cpu")
    )
    assert "cannot start: 3 ranks cannot share a model with 4 heads over 2 KV heads" in line
