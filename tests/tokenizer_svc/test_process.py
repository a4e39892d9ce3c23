"""The tokenizer service as a process: `python -m tokenizer_svc`."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from protos.tokenizer.v1 import tokenizer_pb2 as pb
from protos.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from protos.wire.channel import open_channel
from protos.wire.service import EXIT_CANNOT_START
from tests.fakes.tiny_tokenizers import IM_END, byte_level

MIB = 1 << 20


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """The process and the address that it says it is ready on."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenizer_svc", *arguments, "--port", "0", stderr=PIPE
    )
    assert process.stderr is not None
    try:
        while line := (await asyncio.wait_for(process.stderr.readline(), 30)).decode():
            if "ready on " in line:
                break
        yield process, line.split("ready on ")[-1].split()[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[TokenizerServiceStub]:
    async with open_channel(address) as channel:
        await channel.channel_ready()
        yield TokenizerServiceStub(channel)


async def failed(*arguments: str) -> tuple[int, str]:
    """How the process ends that cannot start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenizer_svc", *arguments, stderr=PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, errors.decode()


@pytest.mark.slow
async def test_the_default_model_is_served_in_little_memory(default_model_path: Path) -> None:
    async with started("--model", str(default_model_path)) as (process, address):
        async with connected(address) as stub:
            messages = json.dumps([{"role": "user", "content": "a<|im_end|>"}]).encode()
            chat = pb.ChatPrompt(messages_json=messages, add_generation_prompt=True)
            ids = list((await stub.Encode(pb.EncodeRequest(chat=chat))).token_ids)
            # A system turn, the user's, and the header of the answer.
            assert (ids.count(1), ids.count(2)) == (3, 2)
            status = await stub.GetStatus(pb.GetStatusRequest())
            assert list(status.eos_token_ids) == [2]
            assert status.tool_call_format == pb.TOOL_CALL_FORMAT_HERMES
            assert not status.has_reasoning
            assert status.model.name == "SmolLM2-135M-Instruct"
        main = psutil.Process(process.pid)
        family = [main, *main.children(recursive=True)]
        assert len(family) == 2
        assert sum(member.memory_info().rss for member in family) < 150 * MIB
        mapped = {Path(entry.path).name for member in family for entry in member.memory_maps()}
        assert not any("torch" in name for name in mapped)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 15) == 0
        assert not any(member.is_running() for member in family[1:])


async def test_a_directory_is_served_with_a_template_of_the_operators(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    arguments = ("--model", str(tmp_path), "--served-model-name", "mine")
    template = ("--chat-template", str(tmp_path / "mine.jinja"))
    async with started(*arguments, *template) as (_, address), connected(address) as stub:
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert status.model.name == "mine"
        # The template's turn end ends an answer, though no file calls it EOS.
        assert list(status.eos_token_ids) == [IM_END]
        tokenizer = await stub.GetTokenizer(pb.GetTokenizerRequest())
        assert list(tokenizer.eos_token_ids) == [IM_END]
    async with started(*arguments) as (_, address), connected(address) as stub:
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert not status.has_chat_template


async def test_a_killed_template_worker_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    async with (
        started("--model", str(tmp_path)) as (process, address),
        connected(address) as stub,
    ):
        chat = pb.ChatPrompt(messages_json=b'[{"role": "user", "content": "ab"}]')
        request = pb.EncodeRequest(chat=chat)
        assert list((await stub.Encode(request)).token_ids) == [64, 65]
        [worker] = psutil.Process(process.pid).children()
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(10)
        assert list((await stub.Encode(request)).token_ids) == [64, 65]


async def test_what_prevents_a_start_is_said_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    (tmp_path / "bad.jinja").write_text("{% for %}")
    for arguments, cause in (
        (("--model", str(tmp_path / "none")), "there is no model at"),
        (("--model", str(broken)), "not a usable GGUF file"),
        ((), "--model"),
        (("--model", str(tmp_path), "--chat-template", str(tmp_path / "bad.jinja")), "line 1"),
    ):
        status, errors = await failed(*arguments)
        assert status == EXIT_CANNOT_START
        assert errors.startswith("tokenizer_svc: cannot start: ") and cause in errors
        assert errors.count("\n") == 1
