"""The default line as a person meets it: the printed command, ps, chat, the processes."""

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.running_line import TOKENLINE, RunningLine
from tests.fakes.streaming_client import open_stream

pytestmark = pytest.mark.slow

SERVICES = {"gateway-1", "gateway-2", "tokenizer_svc", "detok_svc", "engine_svc", "redis"}
LIGHT = sorted(SERVICES - {"engine_svc", "redis"})
MAX_LIGHT_BYTES = 150_000_000


def run_printed_curl(line: RunningLine) -> str:
    """The output of the command that the launcher printed, as a shell runs it."""
    match = re.search(r"^curl .*?[^\\]$", line.output, flags=re.MULTILINE | re.DOTALL)
    assert match is not None
    if shutil.which("curl"):
        command = match[0].replace("curl", "curl --silent --show-error", 1)
        result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        return result.stdout
    # The same request, where there is no curl.
    words = shlex.split(match[0].replace("\\\n", ""))
    assert [word for word in words if word.startswith("-")] == ["-N", "-H", "-d"]
    name, _, value = words[words.index("-H") + 1].partition(": ")
    body = words[words.index("-d") + 1]
    return httpx.post(words[2], headers={name: value}, content=body, timeout=60).text


def joined_text(stream: str) -> str:
    """The text of a streamed chat, which must be well formed to its end."""
    data = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data")]
    assert data[-1] == "[DONE]"
    events: list[dict[str, Any]] = [json.loads(event) for event in data[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert len(deltas) > 3
    return "".join(delta.get("content") or "" for delta in deltas)


def test_the_printed_curl_streams_an_answer_that_names_paris(line: RunningLine) -> None:
    assert "Berlin" in joined_text(run_printed_curl(line))


def test_chat_names_paris(line: RunningLine) -> None:
    result = subprocess.run(
        [TOKENLINE, "chat", "--temperature", "0", "What is the capital of Germany?"],
        env=line.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "Berlin" in result.stdout
    assert "tokens/s" in result.stderr


def test_ps_shows_each_service_as_a_process_of_its_own(line: RunningLine) -> None:
    result = subprocess.run(
        [TOKENLINE, "ps"], env=line.environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    rows = {row[0]: row for row in map(str.split, result.stdout.splitlines()) if row}
    assert rows.keys() >= SERVICES
    pids = {name: int(rows[name][1]) for name in SERVICES}
    assert len(set(pids.values())) == len(SERVICES)
    for name, pid in pids.items():
        process = psutil.Process(pid)
        assert process.ppid() == line.process.pid
        command = " ".join(process.cmdline())
        expected = "valkey-server" if name == "redis" else f"-m {name.partition('-')[0]} "
        assert expected in command


async def test_ps_shows_a_live_request(line: RunningLine) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        models = await client.get(f"{line.url}/v1/models")
        body = {
            "model": models.json()["data"][0]["id"],
            "messages": [{"role": "user", "content": "Tell me a very long story."}],
            # Longer than `tokenline ps` takes.
            "max_tokens": 6000,
            "ignore_eos": True,
        }
        async with open_stream(client, line.url, body, "shown-by-ps") as events:
            await anext(events)
            process = await asyncio.create_subprocess_exec(
                *(TOKENLINE, "ps"), env=line.environment, stdout=subprocess.PIPE
            )
            output, _ = await process.communicate()
    rows = {row[0]: row for row in map(str.split, output.decode().splitlines()) if row}
    assert rows["shown-by-ps"][1] in ("waiting", "prefilling", "decoding")


@pytest.mark.parametrize("name", LIGHT)
def test_only_the_engine_holds_torch(name: str, line: RunningLine) -> None:
    def has_torch(service: str) -> bool:
        maps = Path(f"/proc/{line.service(service).pid}/maps").read_text()
        return "libtorch" in maps

    assert has_torch("engine_svc")
    assert not has_torch(name)


@pytest.mark.parametrize("name", LIGHT)
def test_a_service_without_a_model_is_small(name: str, line: RunningLine) -> None:
    # After work, not only after the start.
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    model = httpx.get(f"{line.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(
        f"{line.url}/v1/chat/completions", json={"model": model, **body}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    assert psutil.Process(line.service(name).pid).memory_info().rss < MAX_LIGHT_BYTES


@pytest.mark.parametrize("service", ["gateway", "tokenizer_svc", "detok_svc"])
def test_a_service_without_a_model_imports_no_torch(service: str) -> None:
    code = f"import sys, {service}.__main__; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    modules = {name.partition(".")[0] for name in result.stdout.split()}
    assert service in modules
    assert "torch" not in modules
