"""The gateway as a process: start-up faults, what it imports, SIGTERM, raw bytes on its port."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import psutil
import pytest

from gateway.http_protocol import MAX_HEAD_BYTES
from tests.fakes.gateway_line import MODEL, GatewayLine, until_ready
from tests.fakes.ports import free_port
from tests.fakes.scripted_detok import pieces
from tests.fakes.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
ADDRESSES = ["--tokenizer", "127.0.0.1:1", "--detok", "127.0.0.1:1", "--engine", "127.0.0.1:1"]


@asynccontextmanager
async def gateway_process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run_gateway(*arguments: str) -> tuple[int | None, str]:
    async with gateway_process(*arguments) as process:
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        return process.returncode, errors.decode()


async def test_missing_settings_are_all_said_at_once() -> None:
    status, errors = await run_gateway("--port", "x")
    assert status == 78
    assert len(errors.splitlines()) == 1
    for word in ("--port", "--tokenizer", "--detok", "--engine"):
        assert word in errors


async def test_a_taken_port_is_said_in_one_line(line: GatewayLine) -> None:
    status, errors = await run_gateway(*ADDRESSES, "--port", str(line.port))
    assert status == 78
    assert errors.splitlines()[-1].startswith(f"gateway: cannot start: port {line.port} ")


async def test_a_bad_redis_url_is_said_in_one_line() -> None:
    status, errors = await run_gateway(*ADDRESSES, "--port", "0", "--redis", "http://x")
    assert status == 78
    assert "cannot use the Redis URL" in errors.splitlines()[-1]


async def test_sigterm_drains_and_exits_with_zero(line: GatewayLine) -> None:
    port = free_port()
    gate = asyncio.Event()
    line.detok.script = pieces("a", "b", gates={1: gate})
    settings = line.settings
    async with gateway_process(
        *("--port", str(port), "--redis", settings.redis, "--drain-seconds", "20"),
        *("--tokenizer", settings.tokenizer[0], "--detok", settings.detok[0]),
        *("--engine", settings.engine[0], "--redis-prefix", settings.redis_prefix),
    ) as process:
        url = f"http://127.0.0.1:{port}"
        async with httpx2.AsyncClient(base_url=url, timeout=30.0) as client:
            while True:
                try:
                    await until_ready(client)
                    break
                except httpx2.ConnectError:
                    assert process.returncode is None
                    await asyncio.sleep(0.02)
            # Issue 2: the gateway stays light.
            assert psutil.Process(process.pid).memory_info().rss < 150 << 20
            body = {"model": MODEL, "prompt": "hi", "stream": True}
            async with client.stream(
                "POST", "/v1/completions", json=body, headers={"x-request-id": "drained"}
            ) as response:
                events = response.aiter_text()
                text = await anext(events)
                os.kill(process.pid, signal.SIGTERM)
                gate.set()
                text += "".join([event async for event in events])
            assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 30) == 0
        record = await line.record("drained")
        assert record["finish_reason"] == "stop"


def test_the_gateway_imports_nothing_heavy() -> None:
    script = (
        "import sys, gateway.server, gateway.settings\n"
        "heavy = {'torch', 'tokenizers', 'jinja2', 'numpy', 'transformers', 'gguf', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


async def exchange(port: int, data: bytes, pause_after: int | None = None) -> bytes:
    """Everything the server answers to raw bytes until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data[:pause_after])
        if pause_after is not None:
            await writer.drain()
            writer.write(data[pause_after:])
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 20) + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000 + b"\r\n", b"431"),
    ],
)
async def test_raw_bytes_that_are_no_request_get_a_4xx(
    line: GatewayLine, data: bytes, status: bytes
) -> None:
    answer = await exchange(line.port, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert body.startswith(b'{"error":{"message":')
    assert (await line.chat()).status_code == 200


async def test_a_head_within_the_limit_may_come_in_pieces(line: GatewayLine) -> None:
    head = b"GET /healthz HTTP/1.1\r\nconnection: close\r\nx: " + b"a" * (MAX_HEAD_BYTES - 200)
    answer = await exchange(line.port, head + b"\r\n\r\n", pause_after=30_000)
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_huge_announced_body_is_refused_at_once(line: GatewayLine) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{"
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(head)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    assert answer.startswith(b"HTTP/1.1 413")
    writer.close()
    await until(lambda: not line.detok.live)


async def test_many_requests_on_one_connection(line: GatewayLine) -> None:
    for _ in range(5):
        body = b'{"model": "tiny", "prompt": "hi"}' + b" " * 100_000
        request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        ) + body
        last = request.replace(b"host: x", b"connection: close")
        answer = await exchange(line.port, request * 3 + last)
        assert answer.count(b"HTTP/1.1 200") == 4
