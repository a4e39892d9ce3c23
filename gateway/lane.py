"""A lane: one replica of one service, what it last said about itself, and what is wrong with it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2, detok_pb2_grpc
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.errors import ERROR_METADATA_KEY, RequestTimeout, Unavailable, from_rpc_error
from protos.wire.logs import request_metadata
from protos.wire.multiplex_client import StreamClient
from protos.wire.stream_adapter import detok_adapter

# For health and status each, which are asked for at once.
_POLL_TIMEOUT_SECONDS: Final = 2.0
# Between two polls. With the timeout, a replica that hangs is known within 2.5 s.
_READY_PAUSE_SECONDS: Final = 0.5
_AWAY_PAUSE_SECONDS: Final = 0.2
# Templates and long prompts take time. What takes longer would so at any other tokenizer.
_ENCODE_TIMEOUT_SECONDS: Final = 30.0
# What a server's end gives its calls, as the case may be, when nothing typed comes with it.
_LOST_STATUSES: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING


class _Status(Protocol):
    @property
    def model(self) -> common_pb2.ModelIdentity: ...


StatusT = TypeVar("StatusT", bound=_Status)


class Lane(ABC, Generic[StatusT]):
    """Base of the three kinds. An async context manager that holds the channel.

    `problem` says why the replica cannot be used now; empty when it can. `status` is the last
    answer to GetStatus. `suspect`: work on it was lost since the last good poll; others are to be
    preferred.
    """

    role = ""

    def __init__(self, address: str) -> None:
        self.address = address
        self.status: StatusT | None = None
        self.problem = "has not answered yet"
        self._num_doubts = 0
        self._num_doubts_dispelled = 0
        self._poll_soon = asyncio.Event()
        self._channel = open_channel(address)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    @property
    def name(self) -> str:
        return f"{self.role} {self.address}"

    @property
    def healthy(self) -> bool:
        return not self.problem

    @property
    def suspect(self) -> bool:
        return self._num_doubts > self._num_doubts_dispelled

    def doubt(self) -> None:
        """Work on the replica was lost: suspect until a poll that begins from now on is good."""
        self._num_doubts += 1
        self._poll_soon.set()

    @property
    def fingerprint(self) -> str:
        """The model fingerprint it reports; empty while unknown."""
        return self.status.model.fingerprint if self.status is not None else ""

    @property
    def num_live(self) -> int:
        """Sequences of this gateway that depend on the lane."""
        return 0

    async def poll(self) -> None:
        """Asks for health and status once, and updates `status`, `problem` and `suspect`."""
        self._poll_soon.clear()
        num_doubts = self._num_doubts
        request = health_pb2.HealthCheckRequest()
        try:
            # Both on their way at once: who sleeps is woken once for them.
            answer, self.status = await asyncio.gather(
                self._health.Check(request, timeout=_POLL_TIMEOUT_SECONDS),
                self._get_status(_POLL_TIMEOUT_SECONDS),
            )
        except grpc.aio.AioRpcError as error:
            self.problem = f"cannot be reached ({error.code().name})"
        else:
            self.problem = "" if answer.status == _SERVING else "is starting or draining"
        if not self.problem:
            self._num_doubts_dispelled = num_doubts

    async def pause(self) -> None:
        """The wait between two polls: short while the replica is not usable, none after a doubt."""
        seconds = _READY_PAUSE_SECONDS if self.healthy else _AWAY_PAUSE_SECONDS
        # Not wait_for: Python 3.11's loses a cancel that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._poll_soon.wait()

    @abstractmethod
    async def _get_status(self, timeout_seconds: float) -> StatusT:
        """One call of GetStatus."""


class TokenizerLane(Lane[tokenizer_pb2.GetStatusResponse]):
    role = "tokenizer"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """A prompt as tokens. Raises TokenlineError: Unavailable if the replica is away or lost,
        RequestTimeout if the work takes too long; it is then cancelled at the tokenizer.
        """
        response: tokenizer_pb2.EncodeResponse = await self._ask(self._stub.Encode, request)
        return response

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> str:
        """The text of token ids. Raises as `encode`."""
        response: tokenizer_pb2.DecodeResponse = await self._ask(self._stub.Decode, request)
        return response.text

    async def _ask(self, call: Callable[..., Awaitable[Any]], request: object) -> Any:
        try:
            return await call(request, timeout=_ENCODE_TIMEOUT_SECONDS, metadata=request_metadata())
        except grpc.aio.AioRpcError as error:
            timed_out = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if timed_out and self.healthy and not self.suspect:
                raise RequestTimeout(
                    f"Tokenizing took longer than {_ENCODE_TIMEOUT_SECONDS:g} seconds; shorten it.",
                    code="encode_timeout",
                ) from error
            if timed_out or (error.code() in _LOST_STATUSES and not _is_typed(error)):
                raise Unavailable(
                    "A tokenizer was lost while it worked on this request; try again.",
                    code="tokenizer_lost",
                ) from error
            raise from_rpc_error(error) from error

    async def _get_status(self, timeout_seconds: float) -> tokenizer_pb2.GetStatusResponse:
        return await self._stub.GetStatus(tokenizer_pb2.GetStatusRequest(), timeout=timeout_seconds)


class EngineLane(Lane[engine_pb2.GetStatusResponse]):
    """An engine, which this gateway drives through the detokenizers only."""

    role = "engine"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.load = common_pb2.EngineLoad()
        self.num_own_sequences = 0
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)

    @property
    def num_sequences(self) -> int:
        """What it has to do: its own report, or what this gateway knows before the report."""
        return max(self.num_own_sequences, self.load.num_running + self.load.num_waiting)

    async def poll(self) -> None:
        await super().poll()
        if self.status is not None and self.healthy:
            self.load = self.status.load

    async def _get_status(self, timeout_seconds: float) -> engine_pb2.GetStatusResponse:
        return await self._stub.GetStatus(engine_pb2.GetStatusRequest(), timeout=timeout_seconds)


class DetokLane(Lane[detok_pb2.GetStatusResponse]):
    """A detokenizer, with the one stream that carries all sequences through it."""

    role = "detok"

    def __init__(
        self, address: str, on_loads: Callable[[Sequence[detok_pb2.EngineLoadReport]], None]
    ) -> None:
        super().__init__(address)
        self._stub = detok_pb2_grpc.DetokServiceStub(self._channel)
        self._stack = AsyncExitStack()
        self.client: StreamClient[detok_pb2.Submit, detok_pb2.Output] = StreamClient(
            self._stub.Generate,
            detok_adapter(),
            lost_code="detok_lost",
            on_response=lambda response: on_loads(response.engine_loads),
        )

    @property
    def num_live(self) -> int:
        return self.client.num_live

    @property
    def suspect(self) -> bool:
        return super().suspect or not self.client.connected

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.client)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
        await super().__aexit__(kind, error, traceback)

    async def _get_status(self, timeout_seconds: float) -> detok_pb2.GetStatusResponse:
        return await self._stub.GetStatus(detok_pb2.GetStatusRequest(), timeout=timeout_seconds)


AnyLane = TokenizerLane | EngineLane | DetokLane


def _is_typed(error: grpc.aio.AioRpcError) -> bool:
    """Whether a server of the line said this, and not gRPC."""
    return any(key == ERROR_METADATA_KEY for key, _ in error.trailing_metadata() or ())
