"""Clients that leave: their sequences are aborted at the detokenizer (KNOWN_FAULTS 63)."""

import asyncio
import json
import random

import pytest

from tests.fakes.gateway_line import MODEL, GatewayLine, eventually, gateway_line, whole_text
from tests.fakes.scripted_detok import DetokScript, output, pieces
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

WORDLESS = DetokScript([output("x"), *(output("") for _ in range(10_000))], delay_seconds=0.005)
ENDLESS = DetokScript([output("x") for _ in range(10_000)], delay_seconds=0.005)
SILENT = DetokScript([])


def request_bytes(path: str, **fields: object) -> bytes:
    body = json.dumps({"model": MODEL, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def open_stream(
    line: GatewayLine, request: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(request)
    return reader, writer


def num_live(line: GatewayLine) -> int:
    return len(line.detok.live)


async def test_bug_63_three_hundred_disconnects_leave_nothing_running(line: GatewayLine) -> None:
    line.detok.script = ENDLESS
    generator = random.Random(63)

    async def one(number: int) -> None:
        request = request_bytes(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": str(number)}],
            stream=True,
            max_tokens=4000,
        )
        reader, writer = await open_stream(line, request)
        for _ in range(generator.randrange(4)):
            await reader.readuntil(b"\n\n")
        await asyncio.sleep(generator.random() * 0.02)
        writer.close()

    for first in range(0, 300, 30):
        await asyncio.gather(*(one(number) for number in range(first, first + 30)))
    await until(lambda: num_live(line) == 0, "no live sequence at the detokenizer")
    assert len(line.detok.aborted) == len(line.detok.submitted)
    # The ledger writes behind the requests.
    await eventually(
        lambda: line.client.get("/v1/requests"), lambda answer: answer.json()["data"] == []
    )
    live = (await line.client.get("/metrics")).text
    assert 'tokenline_live_requests{stage="decoding"} 0.0' in live
    line.detok.script = pieces("fine")
    assert whole_text(await line.chat()) == "fine"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_before_the_first_token_aborts_every_choice(
    line: GatewayLine, stream: bool, n: int
) -> None:
    line.detok.script = SILENT
    request = request_bytes("/v1/completions", prompt="hi", stream=stream, n=n)
    _, writer = await open_stream(line, request)
    await until(lambda: num_live(line) == n)
    (record,) = (await line.client.get("/v1/requests")).json()["data"]
    writer.close()
    await until(lambda: len(line.detok.aborted) == n)
    ended = await line.record(record["id"])
    assert (ended["state"], ended["finish_reason"]) == ("finished", "cancelled")


async def test_a_client_that_leaves_during_preprocessing_starts_nothing(line: GatewayLine) -> None:
    line.tokenizer.gate.clear()
    _, writer = await open_stream(line, request_bytes("/v1/completions", prompt="hi"))
    await until(lambda: len(line.tokenizer.encoded) == 1)
    (record,) = (await line.client.get("/v1/requests")).json()["data"]
    assert record["state"] == "preprocessing"
    writer.close()
    await line.record_when(record["id"])
    line.tokenizer.gate.set()
    assert not line.detok.submitted


async def test_a_client_that_stops_reading_holds_up_nobody(line: GatewayLine) -> None:
    """Its outputs are merged while its socket is full, and it gets every one of them later."""
    text = "x" * 10_000
    line.detok.script = pieces(*[text] * 400)
    reader, writer = await open_stream(
        line, request_bytes("/v1/completions", prompt="slow", stream=True)
    )
    await until(lambda: num_live(line) == 0 and len(line.detok.submitted) == 1)
    line.detok.script = pieces("fine")
    assert whole_text(await line.chat()) == "fine"
    received = b""
    while b"[DONE]" not in received[-100:]:
        received += await reader.read(1 << 20)
    writer.close()
    assert received.count(b"x" * 100) == 400 * 100


async def test_an_idle_stream_is_pinged(valkey: Valkey, redis_prefix: str) -> None:
    async with gateway_line(
        valkey.url, SILENT, redis_prefix=redis_prefix, ping_seconds=0.02
    ) as line:
        body = {"model": MODEL, "prompt": "hi", "stream": True}
        async with line.client.stream("POST", "/v1/completions", json=body) as response:
            events = response.aiter_text()
            assert response.status_code == 200
            assert (await anext(events)).startswith(": ping\n\n")
            assert (await anext(events)).startswith(": ping\n\n")


async def test_a_stream_whose_tokens_have_no_text_yet_is_pinged(
    valkey: Valkey, redis_prefix: str
) -> None:
    async with gateway_line(
        valkey.url, WORDLESS, redis_prefix=redis_prefix, ping_seconds=0.05
    ) as line:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with line.client.stream("POST", "/v1/chat/completions", json=body) as response:
            read = ""
            async for piece in response.aiter_text():
                read += piece
                if read.count(": ping\n\n") == 3:
                    break
        assert read.count("data: ") == 1
