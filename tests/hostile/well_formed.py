"""Calls by a true gRPC client with messages that mean nonsense, drawn from a seeded generator."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2, detok_pb2_grpc
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire.channel import open_channel

_SECONDS: Final = 3.0
_NUMBERS: Final = (0.0, -1.0, 1e30, float("nan"), float("inf"), -float("inf"), 0.5)
_COUNTS: Final = (0, 1, 3, 100_000, (1 << 32) - 1)
_TOKEN_IDS: Final = (0, 1, 77, 257, 258, 100_000, (1 << 32) - 1)


def odd_record(generator: random.Random) -> common_pb2.GenerationRecord:
    """Any value in any field of a record, each as likely right as wrong."""
    ids = generator.choices(_TOKEN_IDS, k=generator.choice([0, 1, 5, 600]))
    record = common_pb2.GenerationRecord(prompt_token_ids=ids)
    if generator.random() < 0.5:
        record.output_token_ids.extend(generator.choices(_TOKEN_IDS, k=3))
    sampling = record.sampling
    for described in sampling.DESCRIPTOR.fields:
        if described.is_repeated or generator.random() < 0.6:
            continue
        if described.type in (described.TYPE_DOUBLE, described.TYPE_FLOAT):
            setattr(sampling, described.name, generator.choice(_NUMBERS))
        elif described.type in (described.TYPE_UINT32, described.TYPE_UINT64):
            setattr(sampling, described.name, generator.choice(_COUNTS))
    return record


async def odd_engine_stream(address: str, generator: random.Random) -> None:
    async with open_channel(address) as channel:
        commands = [_engine_command(generator) for _ in range(generator.randint(1, 6))]
        await _drive(engine_pb2_grpc.EngineServiceStub(channel).Generate(), commands)


async def odd_detok_stream(address: str, generator: random.Random) -> None:
    async with open_channel(address) as channel:
        commands = [_detok_command(generator) for _ in range(generator.randint(1, 6))]
        await _drive(detok_pb2_grpc.DetokServiceStub(channel).Generate(), commands)


async def odd_tokenizer_call(address: str, generator: random.Random) -> None:
    async with open_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        json = generator.choice([b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'[{"role":1}]'])
        requests: list[Awaitable[Any]] = [
            stub.Encode(
                tokenizer_pb2.EncodeRequest(chat=tokenizer_pb2.ChatPrompt(messages_json=json)),
                timeout=_SECONDS,
            ),
            stub.Encode(tokenizer_pb2.EncodeRequest(), timeout=_SECONDS),
            stub.Decode(
                tokenizer_pb2.DecodeRequest(token_ids=generator.choices(_TOKEN_IDS, k=50)),
                timeout=_SECONDS,
            ),
        ]
        # Errors are what is asked for; what matters is the service's health afterwards.
        await asyncio.gather(*requests, return_exceptions=True)


def _engine_command(generator: random.Random) -> engine_pb2.GenerateRequest:
    sequence_id = generator.choice([0, 1, 2, (1 << 64) - 1])
    if generator.random() < 0.2:
        return engine_pb2.GenerateRequest(abort=engine_pb2.Abort(sequence_id=sequence_id))
    if generator.random() < 0.1:
        return engine_pb2.GenerateRequest()
    return engine_pb2.GenerateRequest(
        submit=engine_pb2.Submit(sequence_id=sequence_id, record=odd_record(generator))
    )


def _detok_command(generator: random.Random) -> detok_pb2.GenerateRequest:
    sequence_id = generator.choice([0, 1, 2, (1 << 64) - 1])
    if generator.random() < 0.2:
        return detok_pb2.GenerateRequest(abort=detok_pb2.Abort(sequence_id=sequence_id))
    if generator.random() < 0.1:
        return detok_pb2.GenerateRequest()
    return detok_pb2.GenerateRequest(
        submit=detok_pb2.Submit(
            sequence_id=sequence_id,
            record=odd_record(generator),
            engine_address=generator.choice(["", "127.0.0.1:1", "no such host:1", "x" * 300]),
            stop=generator.choice([[], [""], ["a" * 100_000], ["a"] * 1000]),
        )
    )


async def _drive(call: Any, commands: list[Any]) -> None:
    """Writes the commands, reads for a moment, and leaves."""
    try:
        async with asyncio.timeout(_SECONDS / 10):
            for command in commands:
                await call.write(command)
            while await call.read() is not grpc.aio.EOF:
                pass
    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    finally:
        call.cancel()


Call = Callable[[str, random.Random], Awaitable[None]]
CALLS: Final[dict[str, Call]] = {
    "engine": odd_engine_stream,
    "detok": odd_detok_stream,
    "tokenizer": odd_tokenizer_call,
}
