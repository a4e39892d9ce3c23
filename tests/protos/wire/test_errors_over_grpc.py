"""Typed errors survive a unary call; what gRPC itself reports becomes typed too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire import errors
from protos.wire.channel import open_channel
from protos.wire.errors import StartupError, TokenlineError, from_proto, from_rpc_error, to_proto
from protos.wire.health_check import is_serving
from protos.wire.logs import new_traceparent, request_context, request_metadata
from protos.wire.server import GrpcServer

SERVICE = "protos.tokenizer.v1.TokenizerService"
CLASSES = [
    errors.InvalidRequest,
    errors.NotFound,
    errors.Conflict,
    errors.TooLarge,
    errors.Overloaded,
    errors.Unavailable,
    errors.RequestTimeout,
    errors.RequestCancelled,
    errors.InternalError,
]


class Raising(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[tuple[tuple[str, str], ...]] = []

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: object
    ) -> tokenizer_pb2.EncodeResponse:
        self.seen.append(request_metadata())
        if self.error is not None:
            raise self.error
        return tokenizer_pb2.EncodeResponse(token_ids=[1] * len(request.text.text))


@asynccontextmanager
async def serving(
    servicer: Raising, max_message_bytes: int = 64 << 20
) -> AsyncIterator[tuple[str, tokenizer_pb2_grpc.TokenizerServiceStub]]:
    async with GrpcServer("tokenizer_svc", "127.0.0.1", 0, max_message_bytes) as server:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.grpc)
        await server.start([SERVICE])
        async with open_channel(server.address) as channel:
            yield server.address, tokenizer_pb2_grpc.TokenizerServiceStub(channel)


async def failure(error: Exception) -> TokenlineError:
    async with serving(Raising(error)) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Encode(tokenizer_pb2.EncodeRequest())
    return from_rpc_error(raised.value)


@pytest.mark.parametrize("cls", CLASSES)
async def test_each_class_arrives_as_itself(cls: type[TokenlineError]) -> None:
    arrived = await failure(cls("What happened.", code="a_code", param="messages[0]"))
    assert type(arrived) is cls
    assert (arrived.message, arrived.code, arrived.param) == (
        "What happened.",
        "a_code",
        "messages[0]",
    )


def test_kinds_and_statuses_name_one_class_each() -> None:
    for name in ("kind", "grpc_status", "http_status"):
        assert len({getattr(cls, name) for cls in CLASSES}) == len(CLASSES)
    for cls in CLASSES:
        assert type(from_proto(to_proto(cls("x")))) is cls


async def test_an_unforeseen_exception_says_nothing_of_its_cause() -> None:
    arrived = await failure(ValueError("/secret/path"))
    assert type(arrived) is errors.InternalError
    assert "secret" not in arrived.message


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Encode(tokenizer_pb2.EncodeRequest())
    assert type(from_rpc_error(raised.value)) is errors.Unavailable


async def test_bug_74_messages_over_four_mib_pass_both_ways_and_over_the_limit_fail_cleanly() -> (
    None
):
    async with serving(Raising(), max_message_bytes=8 << 20) as (_, stub):
        text = tokenizer_pb2.TextPrompt(text="x" * 4_200_000)
        answer = await stub.Encode(tokenizer_pb2.EncodeRequest(text=text))
        assert len(answer.token_ids) == 4_200_000
        assert answer.ByteSize() > 4 << 20
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            text = tokenizer_pb2.TextPrompt(text="x" * (9 << 20))
            await stub.Encode(tokenizer_pb2.EncodeRequest(text=text))
        assert type(from_rpc_error(raised.value)) is errors.TooLarge
        small = tokenizer_pb2.EncodeRequest(text=tokenizer_pb2.TextPrompt(text="ab"))
        assert list((await stub.Encode(small)).token_ids) == [1, 1]


async def test_a_taken_port_is_a_start_up_error() -> None:
    async with serving(Raising()) as (address, _):
        port = int(address.rpartition(":")[2])
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken"):
            GrpcServer("tokenizer_svc", "127.0.0.1", port)


async def test_the_health_probe_tells_a_server_that_serves() -> None:
    async with serving(Raising()) as (address, _):
        assert await asyncio.to_thread(is_serving, address)
    assert not await asyncio.to_thread(is_serving, address)


async def test_a_burst_of_calls_is_served_whole() -> None:
    async with serving(Raising()) as (_, stub):
        request = tokenizer_pb2.EncodeRequest(text=tokenizer_pb2.TextPrompt(text="ab"))
        answers = await asyncio.gather(*(stub.Encode(request) for _ in range(3000)))
    assert all(list(answer.token_ids) == [1, 1] for answer in answers)


async def test_a_unary_call_goes_on_in_its_requests_log_context() -> None:
    servicer = Raising()
    traceparent = new_traceparent()
    async with serving(servicer) as (_, stub):
        with request_context("request-7", traceparent):
            await stub.Encode(tokenizer_pb2.EncodeRequest(), metadata=request_metadata())
        await stub.Encode(tokenizer_pb2.EncodeRequest(), metadata=request_metadata())
    assert servicer.seen == [(("x-request-id", "request-7"), ("traceparent", traceparent)), ()]
