"""The launcher on real services: restarts, drain, failures at the start, nothing left behind."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
import redis.asyncio as redis

from compose.embedded_redis import server_command
from compose.ports import free_ports
from tests.fakes.running_line import TOKENLINE, RunningLine, living, running_line, start_launcher
from tests.fakes.streaming_client import finish_reason_of, open_stream, text_of
from tests.fakes.waiting import until, until_true

pytestmark = pytest.mark.slow

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
TIMEOUT = httpx.Timeout(60.0)


async def chat(client: httpx.AsyncClient, url: str) -> str | None:
    """The text of a greedy answer; None while the line cannot serve."""
    try:
        answer = await client.post(
            f"{url}/v1/chat/completions", json={"model": "tiny-llama", **CHAT}
        )
    except httpx.TransportError:
        return None
    if answer.status_code == 503:
        return None
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def service_pids(line: RunningLine) -> list[int]:
    return [service.pid for service in line.state.services]


async def test_each_killed_service_is_restarted_and_the_line_serves_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_line(tmp_path, "--model", str(tiny_model)) as line:
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            reference = await chat(client, line.url)

            assert reference

            async def is_ready() -> bool:
                try:
                    answer = await client.get(f"{line.url}/readyz")
                except httpx.TransportError:
                    return False
                return answer.status_code == 200 and answer.json()["redis"] == "connected"

            async def serves() -> bool:
                text = await chat(client, line.url)
                assert text in (None, reference)
                return text == reference

            for name in ("detok_svc", "tokenizer_svc", "engine_svc", "redis", "gateway"):
                before = line.service(name)
                os.kill(before.pid, signal.SIGKILL)

                def restarted(name: str = name, pid: int = before.pid) -> bool:
                    names = [service.name for service in line.state.services]
                    return name in names and line.service(name).pid != pid

                await until(restarted, f"the restart of {name}")
                assert line.service(name).num_restarts == 1
                assert line.service(name).address == before.address
                await until_true(is_ready)
                await until_true(serves)


async def test_ctrl_c_lets_a_stream_finish_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_line(tmp_path, "--model", str(tiny_model)) as line:
        pids, url = service_pids(line), line.url
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            body = {"model": "tiny-llama", **CHAT, "max_tokens": 200}
            async with open_stream(client, url, body, "last-one") as events:
                seen = [await anext(events)]
                line.interrupt()
                seen += [event async for event in events]
        assert finish_reason_of(seen) in ("length", "stop")
        assert await asyncio.to_thread(line.wait) == 0
    assert living(pids) == []
    assert list((tmp_path / "tokenline").iterdir()) == []
    assert "stopped" in line.output.splitlines()[-1]


async def test_a_second_ctrl_c_ends_everything_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with running_line(tmp_path, "--model", str(tiny_model)) as line:
        pids = service_pids(line)
        # A service that cannot hear the first one.
        os.kill(line.service("gateway").pid, signal.SIGSTOP)
        line.interrupt()
        await until(lambda: "stopping" in line.output)
        line.interrupt()
        assert await asyncio.to_thread(line.wait) == 130
    assert living(pids) == []


async def test_a_stream_whose_only_engine_dies_goes_on_where_it_stood(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_line(tmp_path, "--model", str(tiny_model)) as line:
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            body = {"model": "tiny-llama", **CHAT, "max_tokens": 400}
            async with open_stream(client, line.url, body, "lucky") as events:
                unbroken = [event async for event in events]
            async with open_stream(client, line.url, body, "unlucky") as events:
                seen = [await anext(events) for _ in range(3)]
                os.kill(line.service("engine_svc").pid, signal.SIGKILL)
                seen += [event async for event in events]
            record = (await client.get(f"{line.url}/v1/requests/unlucky")).json()
        assert text_of(seen) == text_of(unbroken)
        assert finish_reason_of(seen) == finish_reason_of(unbroken)
        assert (record["state"], record["num_output_tokens"]) == ("finished", 400)


async def test_a_line_of_several_of_each_service_serves(tiny_model: Path, tmp_path: Path) -> None:
    several = ("--engines", "2", "--detoks", "2", "--tokenizers", "2", "--num-threads", "1")
    with running_line(tmp_path, "--model", str(tiny_model), *several) as line:
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            texts = await asyncio.gather(*(chat(client, line.url) for _ in range(8)))
        assert len(line.state.services) == 8
    assert len(set(texts)) == 1
    assert None not in texts


async def test_a_given_redis_takes_the_place_of_the_embedded_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    with subprocess.Popen(
        server_command("127.0.0.1", port), stdout=subprocess.DEVNULL, cwd=tmp_path
    ) as server:
        try:
            url = f"redis://127.0.0.1:{port}/0"
            with running_line(tmp_path, "--model", str(tiny_model), "--redis", url) as line:
                assert "redis" not in [service.name for service in line.state.services]
                async with (
                    httpx.AsyncClient(timeout=TIMEOUT) as client,
                    redis.Redis.from_url(url) as database,
                ):

                    async def is_recorded() -> bool:
                        return bool(await database.keys("tokenline:request:*"))

                    assert await chat(client, line.url)
                    await until_true(is_recorded)
        finally:
            server.terminate()


async def test_a_redis_that_is_away_is_said_when_the_line_is_ready(
    tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", str(tiny_model), "--redis", "redis://:secret@127.0.0.1:1/0")
    with running_line(tmp_path, *arguments) as line:
        warning = "WARNING: Redis cannot be reached at redis://***@127.0.0.1:1/0."
        await until(lambda: warning in line.output)
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            assert await chat(client, line.url)


async def test_services_do_not_outlive_a_killed_launcher(tiny_model: Path, tmp_path: Path) -> None:
    with running_line(tmp_path, "--model", str(tiny_model)) as line:
        pids = service_pids(line)
        line.process.kill()
        line.wait()
        await until(lambda: living(pids) == [])


async def test_stopping_before_the_line_is_ready_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    with start_launcher(tmp_path, "--model", str(tiny_model)) as line:
        state_directory = tmp_path / "tokenline"
        await until(lambda: any(state_directory.glob("*.json")))
        pids = service_pids(line)
        line.interrupt()
        assert await asyncio.to_thread(line.wait) == 0
    assert living(pids) == []
    assert "is ready" not in line.output


async def end_of_failed_start(tmp_path: Path, *arguments: str) -> str:
    """The last line of a launcher that could not start its line."""
    with start_launcher(tmp_path, *arguments) as line:
        assert await asyncio.to_thread(line.wait) == 1
    assert list((tmp_path / "tokenline").iterdir()) == []
    return line.output.splitlines()[-1]


async def test_a_model_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    last = await end_of_failed_start(tmp_path, "--model", str(broken))
    assert last.startswith("tokenline: ")
    assert " cannot start: " in last
    assert "broken.gguf" in last


async def test_too_little_memory_for_the_kv_cache_is_one_line(
    tiny_model: Path, tmp_path: Path
) -> None:
    last = await end_of_failed_start(tmp_path, "--model", str(tiny_model), "--kv-memory", "1")
    assert last.startswith("tokenline: engine_svc cannot start: ")
    assert "KV cache" in last


async def test_every_wrong_setting_is_in_one_line_before_anything_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, text in {
        "GATEWAY_BOGUS": "1",
        "GATEWAY_MAX_LIVE_REQUESTS": "-5",
        "ENGINE_BLOCK_SIZE": "int3",
        "ENGNE_DTYPE": "float32",
    }.items():
        monkeypatch.setenv(f"TOKENLINE_{key}", text)
    arguments = ("--model", str(tiny_model), "--kv-memory", "banana", "--dtype", "float8")
    result = await asyncio.to_thread(
        subprocess.run,
        [TOKENLINE, "up", "--port", "0", *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("tokenline: wrong settings: ")
    for fault in (
        "TOKENLINE_GATEWAY_BOGUS",
        "TOKENLINE_GATEWAY_MAX_LIVE_REQUESTS: must be at least 1, got -5",
        "TOKENLINE_ENGINE_BLOCK_SIZE: expected a number, got 'int3'",
        "did you mean TOKENLINE_ENGINE_DTYPE?",
        "--kv-memory: expected a size such as 512MiB or 2GiB, got 'banana'",
        "--dtype: expected one of auto, int8, fp8, bfloat16, float32, got 'float8'",
    ):
        assert fault in result.stderr
