"""The gRPC server every service runs: limits, health, reflection, typed errors, drain."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.wire.call_limit import MAX_CONCURRENT_CALLS
from protos.wire.channel import MAX_MESSAGE_BYTES, message_limits
from protos.wire.errors import (
    ERROR_METADATA_KEY,
    InternalError,
    StartupError,
    TokenlineError,
    to_proto,
)
from protos.wire.listening import check_listening
from protos.wire.logs import request_context

logger = logging.getLogger(__name__)


class _UnaryCalls(grpc.aio.ServerInterceptor):
    """Runs unary handlers in their request's log context, and turns what they raise into a gRPC
    status with a typed detail.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        request_id = str(metadata.get("x-request-id", ""))
        traceparent = str(metadata.get("traceparent", ""))

        async def unary(request: Any, context: Any) -> Any:
            if not request_id:
                return await answer(request, context)
            with request_context(request_id, traceparent):
                return await answer(request, context)

        async def answer(request: Any, context: Any) -> Any:
            try:
                return await handler.unary_unary(request, context)
            except TokenlineError as error:
                await _abort(context, error)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception:
                logger.exception("%s failed", method)
                await _abort(
                    context, InternalError("The service failed on this call; see its log.")
                )

        return grpc.unary_unary_rpc_method_handler(
            unary, handler.request_deserializer, handler.response_serializer
        )


async def _abort(context: Any, error: TokenlineError) -> None:
    detail = to_proto(error).SerializeToString()
    await context.abort(
        error.grpc_status, error.message, trailing_metadata=((ERROR_METADATA_KEY, detail),)
    )


class GrpcServer:
    """A gRPC server on host:port; the port is bound by the constructor.

    Binding first tells a taken port before slow work such as loading a model. Add servicers to
    `grpc`, then call `serve_until_stopped`. Use as an async context manager: leaving it stops the
    server.
    """

    def __init__(
        self, service: str, host: str, port: int, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self.service = service
        host = host.strip("[]")
        check_listening(host, port)
        # The colons of an IPv6 address are not that before the port.
        host = f"[{host}]" if ":" in host else host
        self.grpc = grpc.aio.server(
            interceptors=[_UnaryCalls()],
            options=[
                *message_limits(max_message_bytes),
                ("grpc.so_reuseport", 0),
                # Beyond its default of 1000 unaccepted calls, gRPC cancels a part of a burst.
                # Each takes about 10 KB until it is accepted, even where its caller has reset
                # it: 100,000 from one hostile peer took a gigabyte that was not given back.
                ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS),
                ("grpc.server.max_pending_requests", 4_000),
                ("grpc.server.max_pending_requests_hard_limit", 8_000),
                # Clients ping every second, also while idle (channel.py).
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                # A caller that is cut off would leave its sequences running. One that is only
                # stopped for some seconds finds them still there.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
            ],
        )
        try:
            bound = self.grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise StartupError(
                f"port {port} on {host} is taken or may not be used; choose another with --port"
            ) from error
        self.address = f"{host}:{bound}"
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.grpc.stop(0)

    async def start(self, services: Sequence[str]) -> None:
        """Starts serving `services` (full names such as "protos.engine.v1.EngineService")."""
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )
        await self.grpc.start()
        await self._set_health(services, health_pb2.HealthCheckResponse.SERVING)
        logger.info("ready on %s", self.address)

    async def serve_until_stopped(
        self,
        stop: asyncio.Event,
        *,
        services: Sequence[str],
        drain: Callable[[], Awaitable[None]] | None = None,
        grace_seconds: float = 10.0,
    ) -> None:
        """Serves until `stop` is set, then says NOT_SERVING, drains and stops.

        `drain` is given `grace_seconds`; calls still open after that are cancelled.
        """
        await self.start(services)
        await stop.wait()
        logger.info("stopping")
        await self._set_health(services, health_pb2.HealthCheckResponse.NOT_SERVING)
        if drain is not None:
            try:
                await asyncio.wait_for(drain(), grace_seconds)
            except TimeoutError:
                logger.warning("drain took over %s s; cancelling what is left", grace_seconds)
        await self.grpc.stop(1.0)

    async def _set_health(self, services: Sequence[str], status: Any) -> None:
        for service in ("", *services):
            await self._health.set(service, status)
