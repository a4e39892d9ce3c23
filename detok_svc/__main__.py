"""Starts the detokenizer service: `python -m detok_svc --tokenizer HOST:PORT`."""

import asyncio

from detok_svc.engine_link import EngineLinks
from detok_svc.service import SERVICE, DetokService
from detok_svc.settings import Settings
from detok_svc.token_bytes import TokenBytes
from detok_svc.tokenizer_link import watch_fingerprint
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2_grpc
from protos.wire.process_memory import release_free_memory
from protos.wire.server import GrpcServer
from protos.wire.service import install_stop_signals, run_main
from protos.wire.tokenizer_fetch import fetch_tokenizer


async def serve(settings: Settings) -> None:
    """Binds the port, waits for the tokenizer, then serves until a stop signal."""
    stop = install_stop_signals()
    async with GrpcServer("detok_svc", settings.host, settings.port) as server:
        loading = asyncio.create_task(_load_tokenizer(settings))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return
        model, tokens = await loading
        release_free_memory()
        async with (
            EngineLinks(settings.engine_idle_seconds) as engines,
            asyncio.TaskGroup() as tasks,
        ):
            service = DetokService(model, tokens, engines)
            detok_pb2_grpc.add_DetokServiceServicer_to_server(service, server.grpc)
            watch = watch_fingerprint(
                settings.tokenizer, model.fingerprint, settings.tokenizer_poll_seconds
            )
            watching = tasks.create_task(watch)
            await server.serve_until_stopped(
                stop,
                services=[SERVICE],
                drain=lambda: service.drain(settings.drain_seconds),
                grace_seconds=settings.drain_seconds + 1.0,
            )
            watching.cancel()


async def _load_tokenizer(settings: Settings) -> tuple[common_pb2.ModelIdentity, TokenBytes]:
    # The message is tens of MB for a large vocabulary; only what is returned here outlives it.
    fetched = await fetch_tokenizer(settings.tokenizer)
    model = common_pb2.ModelIdentity(name=fetched.model.name, fingerprint=fetched.model.fingerprint)
    return model, TokenBytes(fetched.tokenizer_json)


if __name__ == "__main__":
    run_main("detok_svc", Settings, serve)
