"""A server that hangs or is cut off is noticed; a slow one, or one not listened to, is not lost."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.multiplex_client import StreamClient
from protos.wire.server import GrpcServer
from protos.wire.stream_adapter import engine_adapter
from tests.chaos.relay import Relay
from tests.fakes.engine_script import Script
from tests.fakes.ports import free_port
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.waiting import until

Client = StreamClient[engine_pb2.Submit, engine_pb2.Output]
SILENT = Script(ending=None)


class Received:
    def __init__(self) -> None:
        self.finishes: list[common_pb2.Finish] = []

    def take(self, output: engine_pb2.Output) -> None:
        if output.HasField("finish"):
            self.finishes.append(output.finish)

    async def code(self) -> str:
        await until(lambda: bool(self.finishes), "the finish")
        (finish,) = self.finishes
        return finish.error.code


@asynccontextmanager
async def client_of(address: str, **fields: Any) -> AsyncIterator[Client]:
    async with open_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        client = Client(stub.Generate, engine_adapter(), lost_code="engine_lost", **fields)
        async with client:
            yield client


def submit(prompt_length: int = 1) -> engine_pb2.Submit:
    record = common_pb2.GenerationRecord(
        prompt_token_ids=[1] * prompt_length,
        sampling=common_pb2.SamplingParameters(max_tokens=1_000_000),
    )
    return engine_pb2.Submit(request_id="r", record=record)


async def test_a_server_with_nothing_to_say_is_heard_all_the_same() -> None:
    engine = ScriptedEngine(SILENT)
    num_steps: list[int] = []
    received = Received()

    def note(response: engine_pb2.GenerateResponse) -> None:
        num_steps.append(response.load.num_steps)

    async with (
        engine.serving() as address,
        client_of(address, silence_seconds=1.0, on_response=note) as client,
    ):
        client.submit(submit(), received.take)
        await until(lambda: len(num_steps) >= 6, "six heartbeats")
        assert client.num_live == 1 and not received.finishes
    assert num_steps[-1] == engine.num_steps


async def test_a_black_hole_is_noticed_and_left_by_a_new_connection() -> None:
    engine = ScriptedEngine(SILENT)
    async with engine.serving() as address:
        relay = Relay(int(address.rpartition(":")[2]))
        await relay.open()
        try:
            async with client_of(relay.address) as client:
                lost = Received()
                client.submit(submit(), lost.take)
                await until(lambda: len(engine.submitted) == 1, "the submit")
                # For good; a new connection goes through.
                relay.hold(present=lambda connection: True, new=lambda connection: False)
                assert await lost.code() == "engine_lost"
                client.submit(submit(), Received().take)
                await until(lambda: len(engine.submitted) == 2, "the second submit")
        finally:
            await relay.close()


class Deaf(engine_pb2_grpc.EngineServiceServicer):
    """Greets its callers; reads nothing. May go on writing."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes

    async def Generate(self, request_iterator: Any, context: Any) -> None:
        await context.send_initial_metadata(())
        while True:
            await asyncio.sleep(0.1)
            if self._writes:
                await context.write(engine_pb2.GenerateResponse())


@pytest.mark.parametrize("writes", [False, True])
async def test_a_server_that_reads_nothing_is_given_up(writes: bool) -> None:
    async with GrpcServer("engine_svc", "127.0.0.1", 0) as server:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(Deaf(writes), server.grpc)
        await server.start(["protos.engine.v1.EngineService"])
        async with client_of(server.address, silence_seconds=0.5) as client:
            received = [Received() for _ in range(4)]
            for each in received:
                # Together far more than a connection takes unread.
                client.submit(submit(prompt_length=4 << 20), each.take)
            codes = {await each.code() for each in received}
            # Those behind the write that is stuck were never sent.
            assert "engine_lost" in codes and codes <= {"engine_lost", "engine_unreachable"}


@asynccontextmanager
async def process(tmp_path: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with (tmp_path / "log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *arguments, stdout=log, stderr=log
        )
    try:
        yield child
    finally:
        child.kill()
        await child.wait()


async def test_a_stopped_process_is_noticed_and_used_again_once_it_goes_on(
    tmp_path: Path,
) -> None:
    port = str(free_port())
    arguments = ("tests.fakes.scripted_engine", "--port", port, "--step-seconds", "0.05")
    async with (
        process(tmp_path, *arguments, "--tokens-per-request", "100000") as child,
        client_of(f"127.0.0.1:{port}", silence_seconds=1.0) as client,
    ):
        await until(lambda: client.connected, "the connection")
        lost = Received()
        client.submit(submit(), lost.take)
        outputs: list[engine_pb2.Output] = []
        os.kill(child.pid, signal.SIGSTOP)
        try:
            assert await lost.code() == "engine_lost"
            # Nothing can tell whether a stopped server took a submit, so none is written to it.
            assert not client.connected
        finally:
            os.kill(child.pid, signal.SIGCONT)
        client.submit(submit(), outputs.append)
        await until(lambda: any(output.token_ids for output in outputs), "tokens")


async def test_a_server_is_not_blamed_for_a_stop_of_this_process() -> None:
    engine = ScriptedEngine(SILENT)
    async with engine.serving() as address:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _STOPPED_CALLER, address, cwd=Path.cwd()
        )
        await until(lambda: len(engine.submitted) == 1, "the submit")
        os.kill(child.pid, signal.SIGSTOP)
        # Longer than a server may be silent.
        await asyncio.sleep(4.0)
        os.kill(child.pid, signal.SIGCONT)
        assert await asyncio.wait_for(child.wait(), 30) == 0


# Ends with 1 if its sequence is lost, with 0 when it has heard the server after a stop.
_STOPPED_CALLER = """
import asyncio, sys, time
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.multiplex_client import StreamClient
from protos.wire.stream_adapter import engine_adapter

async def main():
    outputs = []
    channel = open_channel(sys.argv[1])
    stub = engine_pb2_grpc.EngineServiceStub(channel)
    async with channel, StreamClient(stub.Generate, engine_adapter(), lost_code="lost") as client:
        submit = engine_pb2.Submit()
        submit.record.prompt_token_ids.append(1)
        submit.record.sampling.max_tokens = 1_000_000
        client.submit(submit, outputs.append)
        was_stopped_at = None
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.1)
            now = time.monotonic()
            if now - before > 2:
                was_stopped_at = now
            if any(output.HasField("finish") for output in outputs):
                sys.exit(1)
            if was_stopped_at is not None and now - was_stopped_at > 3:
                sys.exit(0)

asyncio.run(main())
"""
