"""Several ranks compute what one does: threads with models of every form, processes over Gloo."""

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never

import psutil
import pytest
import torch
from gguf import GGMLQuantizationType

from engine_svc.compute import device_executor, parallel_processes
from engine_svc.compute.any_executor import config_of_ranks, load_executor
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.parallel_device_sampling import DeviceParallelSampling
from engine_svc.compute.parallel_executor import ParallelExecutor, ParallelStep
from engine_svc.compute.parallel_messages import RankFailure, SentPlan
from engine_svc.compute.parallel_processes import RankProcesses
from engine_svc.compute.ranks import ONE_RANK, Ranks
from engine_svc.planning.errors import ComputeLost, RankLost
from engine_svc.planning.step import (
    RowStart,
    RowStep,
    SampledToken,
    SamplingParameters,
    StepPlan,
)
from kernels import KernelConfig, select_kernels
from protos.wire.errors import StartupError
from tests.fakes.decoding import ExecutorRows
from tests.fakes.device_decoding import load_device_executor
from tests.fakes.grammars import byte_level_compiler, regex
from tests.fakes.thread_ranks import run_ranks
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import (
    BASE_CONFIG,
    VOCAB_SIZE,
    random_weights,
    write_tiny_llama,
    write_tiny_qwen2,
    write_tiny_qwen3,
)

CONFIG = ExecutorConfig(
    8, 512, kv_memory_bytes=4 << 20, num_threads=1, dtype="float32", cpu_kernels="torch"
)
LISTING_ALL = SamplingParameters(
    max_tokens=20, temperature=0.0, logprobs=True, top_logprobs=VOCAB_SIZE
)
SEEDED = SamplingParameters(max_tokens=20, temperature=1.0, seed=5, logprobs=True, top_logprobs=3)
EVERY_OPTION = dataclasses.replace(
    SEEDED,
    temperature=1.3,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((7, 2.0), (200, 3.0), (9, -100.0)),
    allowed_token_ids=frozenset(range(0, VOCAB_SIZE, 2)) | {7, 9},
    bad_words=((4,), (8, 10)),
    min_tokens=30,
    eos_token_ids=frozenset({257}),
)
REQUESTS = [LISTING_ALL, SEEDED, EVERY_OPTION, dataclasses.replace(SEEDED, top_p=0.5)]

Answers = dict[int, list[SampledToken]]


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE - 2, (length,), generator=generator).tolist()


def answers_of(executor: Any) -> Answers:
    requests = {row: (prompt_of(5 + 9 * row, row), each) for row, each in enumerate(REQUESTS)}
    return ExecutorRows(executor).run(requests, 8)


def check_equal(answers: Answers, expected: Answers) -> None:
    """The same ids, log-probabilities of all tokens within 1e-4: so logits but for a constant."""
    for row, tokens in expected.items():
        assert [token.token_id for token in answers[row]] == [token.token_id for token in tokens]
        for token, other in zip(answers[row], tokens, strict=True):
            assert token.error is None
            assert token.logprobs is not None and other.logprobs is not None
            listed = dict(
                zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True)
            )
            for token_id, logprob in zip(
                other.logprobs.top_token_ids, other.logprobs.top_logprobs, strict=True
            ):
                # Of the last ones that are listed another may come in the place of an equal one.
                assert listed.get(token_id, logprob) == pytest.approx(logprob, abs=1e-4)
            assert token.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            if len(other.logprobs.top_token_ids) == VOCAB_SIZE:
                assert listed.keys() == set(range(VOCAB_SIZE))


def no_report(line: str) -> None:
    pass


def load(path: Path, ranks: Ranks = ONE_RANK) -> Any:
    return load_executor(path, CONFIG, no_report, ranks)


def write_gguf(directory: Path, **fields: Any) -> Path:
    config = BASE_CONFIG | {"model_type": "llama", "head_dim": 32} | fields
    path = directory / "model.gguf"
    write_tiny_gguf(path, config, random_weights(config, 3), GGMLQuantizationType.Q8_0)
    return path


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("write", "fields"),
    [
        (write_tiny_llama, {"attention_bias": True, "mlp_bias": True}),
        (write_tiny_llama, {"num_attention_heads": 8, "num_key_value_heads": 8}),
        (write_tiny_qwen2, {"num_key_value_heads": 1, "intermediate_size": 104}),
        (write_tiny_qwen3, {"num_attention_heads": 8}),
        (write_gguf, {}),
    ],
    ids=["biases", "many KV heads", "one KV head, tied", "qwen3", "gguf"],
)
def test_any_model_s_ranks_give_what_one_does(
    tmp_path: Path, size: int, write: Callable[..., Path], fields: Mapping[str, Any]
) -> None:
    path = write(tmp_path, **fields)
    expected = answers_of(load(path))
    answers = run_ranks(size, lambda ranks: answers_of(load(path, ranks)))
    check_equal(answers[0], expected)
    # All that ranks need of each other's results is the same to the last bit.
    assert all(other == answers[0] for other in answers)


def test_a_row_is_the_same_to_the_last_bit_alone_and_among_others(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)

    def run(ranks: Ranks) -> tuple[Answers, Answers]:
        executor = load(path, ranks)
        row = {2: (prompt_of(23, 2), EVERY_OPTION)}
        return answers_of(executor), ExecutorRows(executor).run(row, 8)

    for together, alone in run_ranks(4, run):
        assert together[2] == alone[2]


def test_prompts_are_scored_as_by_one_rank(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    asking = dataclasses.replace(SEEDED, prompt_logprobs=True, top_prompt_logprobs=4)
    prompt = prompt_of(40, 1)
    plan = StepPlan(
        [RowStart(0, prompt, 40, asking, [0, 1, 2])], [RowStep(0, 0, 40, [], True, True)]
    )
    (expected,) = load(path).execute(plan).prompt_logprobs
    for result in run_ranks(2, lambda ranks: load(path, ranks).execute(plan)):
        (scored,) = result.prompt_logprobs
        for entry, other in zip(scored.logprobs, expected.logprobs, strict=True):
            assert entry.top_token_ids == other.top_token_ids
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_ranks_have_a_part_of_the_kv_cache_each_and_the_same_blocks(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    # 2 layers, keys and values, 16 tokens, 2 heads of 16, 4 bytes; with four ranks each has one.
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4
    for size, bytes_of_one in ((1, block_bytes), (2, block_bytes // 2), (4, block_bytes // 2)):
        expected = CONFIG.kv_memory_bytes // size // bytes_of_one
        assert run_ranks(size, lambda ranks: load(path, ranks).num_blocks) == [expected] * size


def test_a_device_s_executor_can_be_a_rank_too(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    expected = answers_of(load(path))
    answers = run_ranks(2, lambda ranks: answers_of(load_device_executor(path, ranks=ranks)))
    for each in answers:
        check_equal(each, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels for devices are not interpreted")
def test_ranks_on_devices_give_what_one_does_with_a_gpu_s_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_llama(tmp_path)
    requests = {0: (prompt_of(9, 0), LISTING_ALL), 1: (prompt_of(5, 1), EVERY_OPTION)}
    expected = ExecutorRows(load(path), 2).run(requests, 4)
    # As it would be chosen for a device.
    monkeypatch.setattr(device_executor, "sampling_kernels", DeviceParallelSampling)

    def run(ranks: Ranks) -> Answers:
        kernels = select_kernels(
            torch.device("cpu"), KernelConfig("float32", implementation="triton")
        )
        limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}
        executor = load_device_executor(path, kernels, ranks=ranks, **limits)
        return ExecutorRows(executor, 2).run(requests, 4)

    for answers in run_ranks(2, run):
        check_equal(answers, expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cpu_kernels": "portable"}, r"--tensor-parallel 2 needs --cpu-kernels torch on the CPU"),
        ({"device": "cuda"}, r"--tensor-parallel 2 needs as many devices, and there are 0"),
    ],
)
def test_what_ranks_cannot_compute_with_is_refused(
    changed: Mapping[str, Any], message: str
) -> None:
    if "device" in changed and torch.cuda.is_available():
        pytest.skip("there are devices")
    with pytest.raises(StartupError, match=message):
        config_of_ranks(dataclasses.replace(CONFIG, **changed), 2)
    assert config_of_ranks(CONFIG, 1) == CONFIG


# Processes over Gloo


@pytest.fixture
def losses() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def load_ranks(losses: list[tuple[str, bool]]) -> Callable[[Path, int], Any]:
    """Loads, with so many ranks, and ends them at the end of a `with` block."""

    def load(path: Path, size: int) -> Any:
        def on_loss(cause: str, had_loaded: bool) -> None:
            losses.append((cause, had_loaded))

        return closing(ParallelExecutor.load(path, CONFIG, size, no_report, on_loss))

    return load


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("write", "fields"),
    [(write_tiny_llama, {}), (write_tiny_qwen3, {"num_key_value_heads": 1})],
    ids=["llama", "qwen3"],
)
def test_ranks_as_processes_give_what_one_does(
    tmp_path: Path,
    load_ranks: Any,
    losses: list[Any],
    size: int,
    write: Callable[..., Path],
    fields: Mapping[str, Any],
) -> None:
    path = write(tmp_path, **fields)
    expected = answers_of(load(path))
    with load_ranks(path, size) as executor:
        assert (executor.vocab_size, executor.max_model_len) == (VOCAB_SIZE, 512)
        check_equal(answers_of(executor), expected)
        pids = executor.rank_pids
        assert len(pids) == size - 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert losses == []


@pytest.mark.slow
def test_grammars_hold_on_all_ranks_and_a_rank_that_is_gone_is_told_of(
    tmp_path: Path, load_ranks: Any, losses: list[Any]
) -> None:
    path = write_tiny_llama(tmp_path)
    asking = dataclasses.replace(SEEDED, grammar=regex("(yes|no)[a-z]{30}"), temperature=1.5)
    requests = {0: (prompt_of(9, 0), asking), 1: (prompt_of(9, 1), SEEDED)}
    with byte_level_compiler() as compiler:
        one = load(path)
        one.follow_grammars(compiler)
        expected = ExecutorRows(one).run(requests, 8)
        with load_ranks(path, 2) as executor:
            executor.follow_grammars(compiler)
            answers = ExecutorRows(executor).run(requests, 8)
            for row, tokens in expected.items():
                assert [t.token_id for t in answers[row]] == [t.token_id for t in tokens]
            (pid,) = executor.rank_pids
            psutil.Process(pid).kill()
            with pytest.raises(ComputeLost, match=rf"rank 1 \(process {pid}\) was ended by SIGK"):
                ExecutorRows(executor).run(requests, 8)
            assert losses == [(f"rank 1 (process {pid}) was ended by SIGKILL", True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("startup error", r"^the file is damaged where only this rank reads it$"),
        ("exception", r"^rank 1 \(process \d+\) failed: MemoryError: out of memory$"),
        ("killed", r"^rank 1 \(process \d+\) was ended by SIGKILL$"),
    ],
)
def test_a_load_that_fails_on_one_rank_is_a_startup_error_with_its_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_ranks: Any,
    losses: list[Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    way: str,
    message: str,
) -> None:
    monkeypatch.setattr(parallel_processes, "_MODULE", "tests.fakes.failing_rank")
    monkeypatch.setenv("FAILING_RANK", way)
    with pytest.raises(StartupError, match=message):
        load_ranks(write_tiny_llama(tmp_path), 2)
    assert [had_loaded for _, had_loaded in losses] == [False]
    # Only a fault of ours has one; in the log of rank 0, which tells whose it is.
    assert ("Traceback" in caplog.text) == (way == "exception")
    assert "Traceback" not in capfd.readouterr().err


def test_where_a_rank_was_killed_that_is_told_and_not_what_follows_from_it(
    losses: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    processes = RankProcesses(lambda *loss: losses.append(loss))
    for code in (None, -9):
        process = SimpleNamespace(pid=7, poll=lambda c=code: c, wait=lambda seconds, c=code: c)
        processes._processes.append(process)  # type: ignore[arg-type]
    processes._take(0, RankFailure("failed: RuntimeError: reset by peer", traceback="Traceback"))
    assert losses == [("rank 2 (process 7) was ended by SIGKILL", False)]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [("rank 1 is gone", RankLost, "^rank 1 is gone$"), ("", ComputeLost, "^rank 0 failed: ours$")],
)
def test_an_error_of_ours_is_not_taken_for_the_loss_of_a_rank(
    failure: str, kind: type[ComputeLost], message: str
) -> None:
    def fail() -> Never:
        raise ValueError("ours")

    processes = SimpleNamespace(failure=lambda patience_seconds: failure)
    step = ParallelStep(SimpleNamespace(wait=fail), processes)  # type: ignore[arg-type]
    with pytest.raises(ComputeLost, match=message) as caught:
        step.wait()
    assert type(caught.value) is kind


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_plan_that_is_sent_arrives_as_it_was(num_steps: int) -> None:
    start = RowStart(1, [5, 6], 2, EVERY_OPTION, [3])
    steps = [RowStep(row, row, 2, (row,), True, False, (7,) * row) for row in range(num_steps)]
    sent = SentPlan.of(StepPlan((start,), tuple(steps)))
    assert pickle.loads(pickle.dumps(sent)).plan == StepPlan((start,), tuple(steps))
