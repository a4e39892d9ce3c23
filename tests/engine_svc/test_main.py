"""The engine as a process: ready, answering, draining on SIGTERM, or saying why it cannot start."""

import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_svc.__main__ import EXIT_HANGS, scheduler_config
from engine_svc.settings import Settings
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.tokenizer.v1 import tokenizer_pb2
from protos.wire.channel import open_channel
from protos.wire.model_files import fingerprint
from protos.wire.multiplex_client import StreamClient
from protos.wire.stream_adapter import engine_adapter
from tests.fakes.engine_process import (
    START_SECONDS,
    engine_process,
    ready_address,
    start_failure,
)
from tests.fakes.engine_server import proto_sampling
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.grammars import text_of
from tests.fakes.scripted_tokenizer import ScriptedTokenizer
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama
from tests.fakes.tiny_tokenizers import IM_END, byte_level


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("num_blocks", "is_capped"), [(31, True), (32, False)])
def test_bug_66_a_pool_smaller_than_one_longest_sequence_caps_it_and_warns(
    caplog: pytest.LogCaptureFixture, num_blocks: int, is_capped: bool
) -> None:
    executor = FakeExecutor(num_blocks=num_blocks, block_size=16, max_model_len=512)
    config = scheduler_config(Settings(model=Path("m.gguf")), executor)  # type: ignore[arg-type]
    assert config.max_servable_len == num_blocks * 16
    assert ("--kv-memory" in caplog.text) == is_capped


@pytest.mark.parametrize(("speculation", "max_draft_tokens"), [("ngram", 5), ("off", 0)])
def test_speculation_can_be_switched_off(speculation: str, max_draft_tokens: int) -> None:
    settings = Settings(model=Path("m.gguf"), speculation=speculation, max_draft_tokens=5)
    config = scheduler_config(settings, FakeExecutor())  # type: ignore[arg-type]
    assert config.max_draft_tokens == max_draft_tokens


@pytest.mark.slow
async def test_the_process_serves_the_model_and_drains_on_sigterm(model_path: Path) -> None:
    async with engine_process(
        *("--model", str(model_path), "--port", "0", "--kv-memory", "1MiB", "--max-num-seqs", "4")
    ) as process:
        address = await ready_address(process)
        async with open_channel(address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            status = await stub.GetStatus(engine_pb2.GetStatusRequest())
            assert status.model.fingerprint == fingerprint(model_path)
            assert (status.vocab_size, status.max_num_seqs, status.block_size) == (
                VOCAB_SIZE,
                4,
                16,
            )
            assert status.max_model_len == 512
            assert 0 < status.load.num_blocks * 16 * 256 <= 1 << 20
            call = stub.Generate()
            record = common_pb2.GenerationRecord(
                prompt_token_ids=[1, 2, 3], sampling=proto_sampling(50)
            )
            submit = engine_pb2.Submit(sequence_id=1, record=record)
            await call.write(engine_pb2.GenerateRequest(submit=submit))
            first = await call.read()
            assert first.outputs[0].prefill_started
            process.send_signal(signal.SIGTERM)
            outputs = list(first.outputs)
            while not outputs[-1].HasField("finish"):
                outputs += (await call.read()).outputs
            await call.done_writing()
            assert outputs[-1].finish.reason == common_pb2.FINISH_REASON_LENGTH
            assert sum(len(output.token_ids) for output in outputs) == 50
        assert await asyncio.wait_for(process.wait(), 30) == 0


@pytest.mark.slow
async def test_the_process_rehearses_a_gpu_and_answers_as_on_the_cpu(model_path: Path) -> None:
    small = ("--max-num-seqs", "1", "--max-num-batched-tokens", "4", "--max-model-len", "32")
    flags = ("--model", str(model_path), "--port", "0", "--kv-memory", "1MiB", *small)
    answers = []
    for kernels in ("triton", "torch"):
        flags_of_kernels = ("--device", "cpu", "--cpu-kernels", kernels, "--dtype", "float32")
        async with engine_process(*flags, *flags_of_kernels, TRITON_INTERPRET="1") as process:
            answers.append(await token_ids_of(await ready_address(process), 5))
    assert len(answers[0]) == 5
    assert answers[0] == answers[1]


async def token_ids_of(address: str, max_tokens: int) -> list[int]:
    """The answer to a prompt of six tokens."""
    sampling = proto_sampling(max_tokens, temperature=1.0, seed=3)
    record = common_pb2.GenerationRecord(prompt_token_ids=range(1, 7), sampling=sampling)
    return [
        token_id for output in await outputs_of(address, record) for token_id in output.token_ids
    ]


async def outputs_of(address: str, record: common_pb2.GenerationRecord) -> list[engine_pb2.Output]:
    """All outputs of one request."""
    async with open_channel(address) as channel:
        call = engine_pb2_grpc.EngineServiceStub(channel).Generate()
        submit = engine_pb2.Submit(sequence_id=1, record=record)
        await call.write(engine_pb2.GenerateRequest(submit=submit))
        outputs: list[engine_pb2.Output] = []
        while not outputs or not outputs[-1].HasField("finish"):
            outputs += (await call.read()).outputs
        await call.done_writing()
    return outputs


class ByteLevelTokenizer(ScriptedTokenizer):
    """Hands out the tiny models' tokenizer."""

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        tokenizer_json = byte_level().to_str().encode()
        return tokenizer_pb2.GetTokenizerResponse(
            model=self.model, tokenizer_json=tokenizer_json, eos_token_ids=[IM_END]
        )


async def finish_of(address: str, grammar: common_pb2.Grammar) -> tuple[str, common_pb2.Finish]:
    """The text and finish of a request with this grammar."""
    sampling = proto_sampling(20, temperature=1.5, eos_token_ids=[IM_END], grammar=grammar)
    record = common_pb2.GenerationRecord(prompt_token_ids=[1, 2, 3], sampling=sampling)
    outputs = await outputs_of(address, record)
    token_ids = [token_id for output in outputs for token_id in output.token_ids]
    return text_of(token_ids), outputs[-1].finish


@pytest.mark.slow
async def test_the_process_enforces_grammars_with_the_tokenizer_of_its_model(
    model_path: Path,
) -> None:
    model = common_pb2.ModelIdentity(name="tiny", fingerprint=fingerprint(model_path))
    flags = ("--model", str(model_path), "--port", "0", "--kv-memory", "1MiB", "--tokenizer")
    # Another model's tokenizer must not do: its ids mean other texts.
    strange = common_pb2.ModelIdentity(name="strange", fingerprint="0123")
    async with (
        ByteLevelTokenizer(model).serving() as right,
        ByteLevelTokenizer(strange).serving() as wrong,
        engine_process(*flags, right) as engine,
        engine_process(*flags, wrong) as engine_without,
    ):
        address = await ready_address(engine)
        text, finish = await finish_of(address, common_pb2.Grammar(regex="(yes|no)!"))
        assert text in ("yes!", "no!")
        assert finish == common_pb2.Finish(reason=common_pb2.FINISH_REASON_STOP)
        text, finish = await finish_of(address, common_pb2.Grammar(json_schema='{"not": {}}'))
        assert (text, finish.error.kind) == ("", common_pb2.ERROR_KIND_INVALID_REQUEST)
        assert (finish.error.code, finish.error.param) == ("unsupported_schema", "grammar")
        address = await ready_address(engine_without)
        _, finish = await finish_of(address, common_pb2.Grammar(regex="a"))
        assert finish.error.code == "grammars_unavailable"
        for process in (engine, engine_without):
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0


@pytest.mark.slow
async def test_the_process_stops_while_it_waits_for_a_tokenizer(model_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with engine_process(
            *("--model", str(model_path), "--port", "0", "--tokenizer", address)
        ) as process:
            assert process.stderr is not None
            while b"no tokenizer from" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0


@pytest.mark.slow
async def test_a_start_that_cannot_succeed_says_why_in_one_line(
    model_path: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing.gguf"
    assert str(missing) in await start_failure("--model", str(missing), "--port", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in await start_failure("--model", str(model_path), "--port", port)


# `python -m engine_svc` with an executor whose steps never end.
_HANGING_ENGINE = """
import time
import engine_svc.__main__ as main
from engine_svc.settings import Settings
from protos.wire.service import run_main
from tests.fakes.fake_executor import FakeExecutor

main.load = lambda settings: FakeExecutor(before_step=lambda plan: time.sleep(3600))
run_main("engine_svc", Settings, main.serve)
"""


async def test_a_step_that_hangs_ends_the_process_with_a_line_that_says_what_it_was(
    tmp_path: Path,
) -> None:
    model = write_tiny_llama(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _HANGING_ENGINE, "--model", str(model), "--port", "0"),
        *("--step-timeout-seconds", "1"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        address = await ready_address(process)
        async with open_channel(address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            async with StreamClient(
                stub.Generate, engine_adapter(), lost_code="engine_lost"
            ) as client:
                record = common_pb2.GenerationRecord(
                    prompt_token_ids=[1, 2, 3], sampling=proto_sampling(5)
                )
                async with client.open(engine_pb2.Submit(record=record)) as outputs:
                    finish = [output async for output in outputs][-1].finish
                assert finish.error.code == "engine_lost"
        _, errors = await asyncio.wait_for(process.communicate(), START_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == EXIT_HANGS
    assert b"a step of 1 sequences and 3 tokens" in errors
    assert b"Traceback" not in errors


# `python -m engine_svc` whose model takes for ever to load.
_LOADING_ENGINE = """
import sys, time
import engine_svc.__main__ as main
from engine_svc.settings import Settings
from protos.wire.service import run_main

def load(settings):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(3600)

main.load = load
run_main("engine_svc", Settings, main.serve)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_ends_the_loading_of_a_model(
    tmp_path: Path, number: signal.Signals
) -> None:
    model = write_tiny_llama(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LOADING_ENGINE, "--model", str(model), "--port", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        while b"loading" not in await asyncio.wait_for(process.stderr.readline(), START_SECONDS):
            pass
        process.send_signal(number)
        _, errors = await asyncio.wait_for(process.communicate(), START_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0
    assert b"stopped while the model was loaded" in errors
    assert b"Traceback" not in errors
