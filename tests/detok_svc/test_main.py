"""The service as a process: start without a tokenizer, readiness, memory, stop."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer, decoders

from protos.detok.v1 import detok_pb2, detok_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.multiplex_client import StreamClient
from protos.wire.stream_adapter import detok_adapter
from tests.fakes.detok_line import Answer, StubTokenizerService, new_submit
from tests.fakes.engine_script import one_per_step
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A running `python -m detok_svc`, with what it has written to stderr so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.log = ""

    async def read_until(self, pattern: str) -> str:
        """Reads the log up to a line that matches; returns the first group, if there is one."""
        assert self._process.stderr is not None
        async with asyncio.timeout(30):
            while (found := re.search(pattern, self.log)) is None:
                line = await self._process.stderr.readline()
                assert line, f"the process ended before {pattern!r}: {self.log}"
                self.log += line.decode()
        return found[found.re.groups]

    async def end(self) -> int:
        """Waits for the end of the process; returns its exit status."""
        assert self._process.stderr is not None
        async with asyncio.timeout(30):
            self.log += (await self._process.stderr.read()).decode()
            return await self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)


@asynccontextmanager
async def detok_process(tokenizer_address: str, *flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "detok_svc", "--tokenizer", tokenizer_address, "--port", "0"),
        *flags,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def generate(address: str, engine_address: str) -> Answer:
    async with open_channel(address) as channel:
        stub = detok_pb2_grpc.DetokServiceStub(channel)
        async with (
            StreamClient(stub.Generate, detok_adapter(), lost_code="detok_lost") as client,
            client.open(new_submit(engine_address=engine_address)) as outputs,
        ):
            return Answer([output async for output in outputs])


async def test_it_waits_for_the_tokenizer_then_serves_and_stops_when_told() -> None:
    tokenizer = StubTokenizerService(byte_level())
    # The port is known before anything listens on it.
    async with tokenizer.serving() as address:
        pass
    async with detok_process(address, "--tokenizer-poll-seconds", "0.1") as process:
        await process.read_until("no tokenizer from")
        async with (
            tokenizer.serving(int(address.rpartition(":")[2])),
            ScriptedEngine(one_per_step(byte_level().encode("hé").ids)).serving() as engine,
        ):
            detok_address = await process.read_until(r"ready on (\S+)")
            assert (await generate(detok_address, engine)).text == "hé"
            async with open_channel(detok_address) as channel:
                stub = detok_pb2_grpc.DetokServiceStub(channel)
                status = await stub.GetStatus(detok_pb2.GetStatusRequest())
            assert status.model.fingerprint == tokenizer.fingerprint
            tokenizer.fingerprint = "another"
            await process.read_until("fingerprint another")
            assert (await generate(detok_address, engine)).text == "hé"
        process.stop()
        assert await process.end() == 0
        assert "Traceback" not in process.log


async def test_it_stops_while_it_waits_for_the_tokenizer() -> None:
    async with detok_process("127.0.0.1:1") as process:
        await process.read_until("no tokenizer from")
        process.stop()
        assert await process.end() == 0


async def test_a_decoder_that_is_not_supported_is_a_start_up_error() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    async with (
        StubTokenizerService(tokenizer).serving() as address,
        detok_process(address) as process,
    ):
        assert await process.end() == 78
    assert process.log.splitlines()[-1].startswith("detok_svc: cannot start: ")
    assert "WordPiece" in process.log


def large_byte_level(num_tokens: int) -> Tokenizer:
    """As large as a large model's tokenizer: `num_tokens` tokens, each with its merge."""
    document = json.loads(byte_level().to_str())
    vocab, merges = document["model"]["vocab"], document["model"]["merges"]
    pieces = list(vocab)
    for piece in pieces:
        for letter in pieces[:256]:
            if len(vocab) >= num_tokens:
                break
            if piece + letter not in vocab:
                vocab[piece + letter] = len(vocab)
                merges.append([piece, letter])
                pieces.append(piece + letter)
    for added in document["added_tokens"]:
        added["id"] = vocab[added["content"]] = len(vocab)
    return Tokenizer.from_str(json.dumps(document))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [49_152, 262_144])
async def test_memory_stays_small_with_a_large_vocabulary(num_tokens: int) -> None:
    tokenizer = StubTokenizerService(large_byte_level(num_tokens))
    async with tokenizer.serving() as address, detok_process(address) as process:
        await process.read_until("ready on")
        memory = psutil.Process(process.pid).memory_info().rss
    assert memory < 150e6, f"{memory / 1e6:.0f} MB"


async def test_it_imports_neither_torch_nor_the_other_services() -> None:
    code = (
        "import sys, detok_svc.__main__;"
        "names = {name.partition('.')[0] for name in sys.modules};"
        "print(sorted(names & {'torch', 'gateway', 'tokenizer_svc', 'engine_svc', 'redis'}))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await process.communicate()
    assert stdout.decode().strip() == "[]"
