"""What comes on a connection behind a request that is still being answered."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protos.common.v1 import common_pb2
from tests.fakes.gateway_line import MODEL, GatewayLine
from tests.fakes.scripted_detok import DetokScript, output
from tests.fakes.waiting import until

GARBAGE = b"\x16\x03\x01 no HTTP\r\n\r\n"


def request(path: str, body: Any = None, headers: str = "") -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def chat(request_id: str, *, stream: bool) -> bytes:
    body = {
        "model": MODEL,
        "stream": stream,
        "messages": [{"role": "user", "content": "hi"}],
    }
    return request("/v1/chat/completions", body, f"x-request-id: {request_id}\r\n")


@asynccontextmanager
async def connection(
    line: GatewayLine,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def gated(line: GatewayLine) -> asyncio.Event:
    """Lets answers stop before their second piece until the event is set."""
    gate = asyncio.Event()
    finish = output("b", finish=common_pb2.FINISH_REASON_STOP)
    line.detok.script = DetokScript([output("a"), finish], {1: gate})
    return gate


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behind",
    [
        GARBAGE,
        b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 17),
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_cannot_be_parsed_does_not_disturb_the_answer_before_it(
    line: GatewayLine, stream: bool, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gated(line)
    async with connection(line) as (reader, writer):
        writer.write(chat("first", stream=stream))
        received = b""
        if stream:
            received = await reader.readuntil(b'"content":"a"')
        else:
            await until(lambda: bool(line.detok.submitted))
        writer.write(behind)
        with caplog.at_level(logging.WARNING, logger="uvicorn.error"):
            await until(lambda: "Invalid HTTP" in caplog.text or len(behind) > 1 << 16)
            # Whatever is sent after that is not looked at.
            writer.write(request("/v1/models"))
            await writer.drain()
            gate.set()
            received += await asyncio.wait_for(reader.read(), 10)
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"invalid_http" not in received
    if stream:
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert json.loads(received.split(b"\r\n\r\n", 1)[1])["choices"][0]["message"]["content"]
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text
    record = await line.record_when("first")
    assert record["finish_reason"] == "stop"


async def test_all_whole_requests_before_what_cannot_be_parsed_are_answered(
    line: GatewayLine,
) -> None:
    async with connection(line) as (reader, writer):
        writer.write(chat("one", stream=True) + chat("two", stream=False) + GARBAGE)
        received = await asyncio.wait_for(reader.read(), 10)
    assert received.count(b"HTTP/1.1 200 ") == received.count(b"HTTP/1.1 ") == 2
    for request_id in ("one", "two"):
        assert (await line.record_when(request_id))["finish_reason"] == "stop"


@pytest.mark.parametrize("before", [b"", request("/v1/models")])
async def test_what_cannot_be_parsed_is_refused_when_no_answer_is_due(
    line: GatewayLine, before: bytes
) -> None:
    async with connection(line) as (reader, writer):
        if before:
            writer.write(before)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.write(GARBAGE)
        received = await asyncio.wait_for(reader.read(), 10)
    assert received.startswith(b"HTTP/1.1 400 ") and b"invalid_http" in received


async def test_a_body_that_breaks_off_into_garbage_is_refused(
    line: GatewayLine, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with connection(line) as (reader, writer):
        writer.write(head)
        await writer.drain()
        writer.write(b"zz\r\n")
        received = await asyncio.wait_for(reader.read(), 10)
    assert received.startswith(b"HTTP/1.1 400 ") and received.count(b"content-length") == 1
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text
