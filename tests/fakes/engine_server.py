"""A real engine service on a loopback port, over any executor, and a client connected to it."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine_svc.engine_loop import engine_thread
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.service import EngineService
from engine_svc.step_runner import Executor
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.multiplex_client import StreamClient
from protos.wire.server import GrpcServer
from protos.wire.stream_adapter import engine_adapter
from tests.fakes.waiting import until

SERVICE = "protos.engine.v1.EngineService"


@dataclass
class Answer:
    """All outputs of one sequence, as they came and joined."""

    outputs: list[engine_pb2.Output] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: engine_pb2.Output) -> None:
        assert not self.ended.is_set(), "an output came after the finish"
        self.outputs.append(output)
        if output.HasField("finish"):
            self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def finish(self) -> common_pb2.Finish:
        return self.outputs[-1].finish


class EngineClient:
    """One stream to an engine and its status calls."""

    def __init__(self, stream: StreamClient[Any, Any], stub: Any) -> None:
        self.stream = stream
        self.stub = stub

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: common_pb2.SamplingParameters,
        **record: Any,
    ) -> tuple[int, Answer]:
        answer = Answer()
        submit = engine_pb2.Submit(
            request_id="request",
            record=common_pb2.GenerationRecord(
                prompt_token_ids=prompt_token_ids, sampling=sampling, **record
            ),
        )
        return self.stream.submit(submit, answer.take), answer

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: common_pb2.SamplingParameters,
        **record: Any,
    ) -> Answer:
        _, answer = self.submit(prompt_token_ids, sampling, **record)
        await asyncio.wait_for(answer.ended.wait(), 30)
        return answer

    async def status(self) -> engine_pb2.GetStatusResponse:
        return await self.stub.GetStatus(engine_pb2.GetStatusRequest())


def proto_sampling(max_tokens: int, **others: Any) -> common_pb2.SamplingParameters:
    values = {"top_p": 1.0, "repetition_penalty": 1.0, **others}
    return common_pb2.SamplingParameters(max_tokens=max_tokens, **values)


def scheduler_config(executor: Executor, **limits: Any) -> SchedulerConfig:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_waiting": 1000, **limits}
    return SchedulerConfig(
        max_model_len=executor.max_model_len,
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        **values,
    )


@dataclass
class RunningEngine:
    service: EngineService
    client: EngineClient
    address: str
    stop: asyncio.Event


@asynccontextmanager
async def run_engine(
    executor: Executor,
    *,
    drain_seconds: float = 5.0,
    step_timeout_seconds: float = math.inf,
    **limits: Any,
) -> AsyncIterator[RunningEngine]:
    """Serves until the block is left or `stop` is set."""
    stop = asyncio.Event()
    config = scheduler_config(executor, **limits)
    model = common_pb2.ModelIdentity(name="fake", fingerprint="0123")
    with engine_thread() as thread:
        async with (
            GrpcServer("engine_svc", "127.0.0.1", 0) as server,
            EngineService(
                executor,
                config,
                model,
                stop.set,
                thread,
                step_timeout_seconds=step_timeout_seconds,
            ) as service,
        ):
            engine_pb2_grpc.add_EngineServiceServicer_to_server(service, server.grpc)
            serving = asyncio.create_task(
                server.serve_until_stopped(
                    stop,
                    services=[SERVICE],
                    drain=lambda: service.drain(drain_seconds),
                    grace_seconds=drain_seconds + 5.0,
                )
            )
            async with open_channel(server.address) as channel:
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                stream: StreamClient[Any, Any] = StreamClient(
                    stub.Generate, engine_adapter(), lost_code="engine_lost"
                )
                async with stream:
                    await until(lambda: stream.connected, "the connection")
                    yield RunningEngine(service, EngineClient(stream, stub), server.address, stop)
            stop.set()
            await serving
