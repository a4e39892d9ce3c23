"""The short form of `python -m tests.chaos`, and whether its tools would see what goes wrong."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.chaos.answer import Answer, differences
from tests.chaos.relay import Relay, every
from tests.chaos.workload import late_text

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT_SECONDS = 600.0
PATIENCE_SECONDS = 10.0


def check_chaos(directory: Path, *arguments: str) -> None:
    """Runs `python -m tests.chaos --short` with these arguments."""
    output = directory / "output"
    with output.open("wb") as file:
        code = subprocess.run(
            [
                *(sys.executable, "-m", "tests.chaos", "--short"),
                *("--logs", str(directory / "logs"), *arguments),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=SHORT_SECONDS,
        ).returncode
    assert code == 0, output.read_text(errors="replace")[-20_000:]


@pytest.mark.slow
def test_streams_come_to_the_identical_end_whatever_is_done_to_the_line(tmp_path: Path) -> None:
    check_chaos(tmp_path)


@pytest.mark.slow
def test_streams_come_to_the_identical_end_when_an_engine_loses_a_rank(tmp_path: Path) -> None:
    check_chaos(tmp_path, "--only", "ranks", "--streams", "8")


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Relay, Callable[[], "asyncio.Future[Streams]"]]]:
    """A relay to a server that sends back what it gets, and a way to connect to it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname()[1])
    await relay.open()
    writers = []

    async def connect() -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writers.append(writer)
        writer.write(b"hello")
        return reader, writer

    try:
        yield relay, lambda: asyncio.ensure_future(connect())
    finally:
        for writer in writers:
            writer.transport.abort()
        await relay.close()
        server.close()
        await server.wait_closed()


async def read(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(1 << 16), PATIENCE_SECONDS)


async def test_a_relay_passes_both_ways_and_resets() -> None:
    async with relayed() as (relay, connect):
        reader, _ = await connect()
        assert await read(reader) == b"hello"
        assert relay.reset() == 1
        with pytest.raises(ConnectionResetError):
            await read(reader)


async def test_a_relay_holds_what_is_sent_and_then_passes_it_on() -> None:
    async with relayed() as (relay, connect):
        reader, writer = await connect()
        assert await read(reader) == b"hello"
        relay.hold(every, every)
        writer.write(b"held")
        late_reader, _ = await connect()
        readings = [asyncio.ensure_future(read(each)) for each in (reader, late_reader)]
        done, _ = await asyncio.wait(readings, timeout=0.1)
        assert not done
        relay.release()
        assert await asyncio.gather(*readings) == [b"held", b"hello"]


async def test_a_relay_refuses_and_opens_again_on_its_port() -> None:
    async with relayed() as (relay, connect):
        relay.refuse()
        with pytest.raises(ConnectionRefusedError):
            await connect()
        await relay.open()
        reader, _ = await connect()
        assert await read(reader) == b"hello"


def answer(*texts: str, reason: str = "stop", logprob: float = -1.0) -> Answer:
    made = Answer()
    for text in texts:
        lists = {"tokens": [text], "token_logprobs": [logprob], "text_offset": [0]}
        piece = {"index": 0, "text": text, "logprobs": {**lists, "top_logprobs": None}}
        made.add({"choices": [piece]})
    made.add({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
    return made


@pytest.mark.parametrize(
    ("other", "kinds"),
    [
        (answer("a", "b"), []),
        (answer("a", "b", logprob=-1.000001), []),
        (answer("a", "b", logprob=-1.0001), ["wrong"]),
        (answer("a", "c"), ["wrong", "wrong"]),
        (answer("a"), ["lost", "lost"]),
        (answer("a", "b", "b"), ["duplicated", "duplicated"]),
        (answer("a", "b", reason="length"), ["wrong"]),
    ],
)
def test_differences_are_told_by_kind(other: Answer, kinds: list[str]) -> None:
    found = differences(answer("a", "b"), other)
    assert [phrase.partition(":")[0] for phrase in found] == kinds


def test_a_stop_string_first_occurs_in_the_second_half_of_the_text() -> None:
    text = "\u4e16 abc def \u4e16 abc def \u4e16 other words \u4e16"
    (found,) = late_text(text)
    assert text.find(found) > len(text) // 2
    assert late_text("abc\u4e16abc") == late_text("") == []
