"""Starts an engine: `python -m engine_svc --model PATH --port PORT`."""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Final, NoReturn

from engine_svc.compute.any_executor import AnyExecutor, load_executor
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.parallel_executor import ParallelExecutor
from engine_svc.engine_loop import engine_thread
from engine_svc.lost_rank import EXIT_LOST_RANK, end_soon
from engine_svc.planning.errors import RankLost
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.step_profile import StepProfile
from engine_svc.service import EngineService
from engine_svc.settings import Settings
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2_grpc
from protos.tokenizer.v1 import tokenizer_pb2
from protos.wire.model_files import fingerprint, model_name
from protos.wire.server import GrpcServer
from protos.wire.service import install_stop_signals, run_main
from protos.wire.tokenizer_fetch import fetch_tokenizer

logger = logging.getLogger(__name__)

LoadedExecutor = AnyExecutor | ParallelExecutor

# EX_SOFTWARE of sysexits.h.
EXIT_HANGS: Final = 70


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Raises when the engine cannot go on."""
    stop = install_stop_signals()
    async with GrpcServer("engine_svc", settings.host, settings.port) as server:
        model = common_pb2.ModelIdentity(
            name=model_name(settings.model), fingerprint=fingerprint(settings.model)
        )
        fetching = asyncio.create_task(fetch_unless_stopped(settings.tokenizer, stop))
        thread = engine_thread()
        executor = await load_unless_stopped(thread, settings, stop)
        compiler = await load_grammars(await fetching, model, executor)
        profile = StepProfile(settings.profile_steps, logger.info)
        if profile.is_on:
            executor.profile_into(profile)
        # What the load left behind lives as long as the process; the collector need not look at
        # it in the middle of a step.
        gc.collect()
        gc.freeze()
        config = scheduler_config(settings, executor)
        async with AsyncExitStack() as stack:
            if compiler is not None:
                stack.enter_context(compiler)
            service = await stack.enter_async_context(
                EngineService(
                    executor,
                    config,
                    model,
                    stop.set,
                    thread,
                    compiler,
                    settings.step_timeout_seconds,
                    profile,
                    settings.stream_interval_ms / 1000,
                )
            )
            engine_pb2_grpc.add_EngineServiceServicer_to_server(service, server.grpc)
            await server.serve_until_stopped(
                stop,
                services=["protos.engine.v1.EngineService"],
                drain=lambda: service.drain(settings.drain_seconds),
                # The last step may outlast the sequences' own time.
                grace_seconds=settings.drain_seconds + 5.0,
            )
        if service.hangs:
            exit_without_threads(EXIT_HANGS)
        if isinstance(executor, ParallelExecutor):
            executor.close()
        if isinstance(service.failure, RankLost):
            exit_without_threads(EXIT_LOST_RANK)
        if service.failure is not None:
            raise service.failure


async def load_unless_stopped(
    thread: ThreadPoolExecutor, settings: Settings, stop: asyncio.Event
) -> LoadedExecutor:
    """What `load` gives, on the engine's thread; ends the process when `stop` is set meanwhile.

    Ranks that it has started end with it, and packed weights that are written get their name last.
    """
    loading = asyncio.get_running_loop().run_in_executor(thread, load, settings)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        logger.info("stopped while the model was loaded")
        exit_without_threads(0)
    stopping.cancel()
    return await loading


def exit_without_threads(code: int) -> NoReturn:
    """Ends the process from beside a busy thread, for which the interpreter would wait."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def load(settings: Settings) -> LoadedExecutor:
    config = ExecutorConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory,
        num_threads=settings.num_threads,
        num_local_engines=settings.num_local_engines,
        device=settings.device,
        dtype=settings.dtype,
        activations=settings.activations,
        kv_dtype=settings.kv_dtype,
        cpu_kernels=settings.cpu_kernels,
        batch_invariant=settings.batch_invariant,
    )
    if settings.tensor_parallel > 1:
        return ParallelExecutor.load(
            settings.model, config, settings.tensor_parallel, logger.info, on_loss=end_soon
        )
    return load_executor(settings.model, config, report=logger.info)


async def fetch_unless_stopped(
    addresses: Sequence[str], stop: asyncio.Event
) -> tokenizer_pb2.GetTokenizerResponse | None:
    """The tokenizer, waited for; None without addresses, or when `stop` is set first."""
    if not addresses:
        return None
    fetching = asyncio.create_task(fetch_tokenizer(addresses))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((fetching, stopping), return_when=asyncio.FIRST_COMPLETED)
        return await fetching if fetching.done() else None
    finally:
        fetching.cancel()
        stopping.cancel()


async def load_grammars(
    fetched: tokenizer_pb2.GetTokenizerResponse | None,
    model: common_pb2.ModelIdentity,
    executor: LoadedExecutor,
) -> GrammarCompiler | None:
    """Lets the executor follow grammars, given the tokenizer of its model."""
    if fetched is None:
        return None
    if fetched.model.fingerprint != model.fingerprint:
        logger.warning(
            "the tokenizer service serves another model, %s, so no grammars are enforced",
            fetched.model.name,
        )
        return None
    compiler = await asyncio.to_thread(
        GrammarCompiler, fetched.tokenizer_json, fetched.eos_token_ids, executor.vocab_size
    )
    executor.follow_grammars(compiler)
    return compiler


def scheduler_config(settings: Settings, executor: LoadedExecutor) -> SchedulerConfig:
    """The limits of what was loaded; warns when the KV cache is what limits a sequence."""
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=executor.max_model_len,
        max_waiting=settings.max_waiting,
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        prefix_cache=settings.prefix_cache,
        max_draft_tokens=settings.max_draft_tokens if settings.speculation == "ngram" else 0,
        max_steps_in_flight=executor.max_steps_in_flight,
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
