"""Starts an engine: `python -m engine_svc --model PATH --port PORT`."""

import asyncio
import gc
import logging

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.service import EngineService
from engine_svc.settings import Settings
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2_grpc
from protos.wire.model_files import fingerprint, model_name
from protos.wire.server import GrpcServer
from protos.wire.service import install_stop_signals, run_main

logger = logging.getLogger(__name__)


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Raises when the engine cannot go on."""
    stop = install_stop_signals()
    async with GrpcServer("engine_svc", settings.host, settings.port) as server:
        model = common_pb2.ModelIdentity(
            name=model_name(settings.model), fingerprint=fingerprint(settings.model)
        )
        executor = await asyncio.to_thread(load_executor, settings)
        # What the load left behind lives as long as the process; the collector need not look at
        # it in the middle of a step.
        gc.collect()
        gc.freeze()
        config = scheduler_config(settings, executor)
        async with EngineService(executor, config, model, on_failure=stop.set) as service:
            engine_pb2_grpc.add_EngineServiceServicer_to_server(service, server.grpc)
            await server.serve_until_stopped(
                stop,
                services=["protos.engine.v1.EngineService"],
                drain=lambda: service.drain(settings.drain_seconds),
                # The last step may outlast the sequences' own time.
                grace_seconds=settings.drain_seconds + 5.0,
            )
        if service.failure is not None:
            raise service.failure


def load_executor(settings: Settings) -> Executor:
    config = ExecutorConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory,
        num_threads=settings.num_threads,
        dtype=settings.dtype,
    )
    return Executor.load(settings.model, config, report=logger.info)


def scheduler_config(settings: Settings, executor: Executor) -> SchedulerConfig:
    """The limits of what was loaded; warns when the KV cache is what limits a sequence."""
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=executor.max_model_len,
        max_waiting=settings.max_waiting,
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        prefix_cache=settings.prefix_cache,
    )
    if config.max_servable_len < config.max_model_len:
        logger.warning(
            "the KV cache holds %d tokens, so sequences are limited to that instead of the "
            "model's %d; give it more with --kv-memory",
            config.num_slots,
            config.max_model_len,
        )
    return config


if __name__ == "__main__":
    run_main("engine_svc", Settings, serve)
