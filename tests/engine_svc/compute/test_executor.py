"""The executor: what it refuses at load, its limits, and steps whose answers do not hang on how."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.compute import executor as executor_module
from engine_svc.compute import memory
from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.planning.step import (
    RowStart,
    RowStep,
    SampledToken,
    SamplingParameters,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from engine_svc.planning.step_profile import StepProfile
from kernels.cpu.library import runnable
from protos.wire.errors import StartupError
from tests.fakes.decoding import ExecutorRows, load_tiny_executor
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama

GREEDY = SamplingParameters(max_tokens=20, temperature=0.0, logprobs=True, top_logprobs=3)
SEEDED = dataclasses.replace(GREEDY, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def executor(model_path: Path) -> Executor:
    return load_tiny_executor(model_path)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE - 2, (length,), generator=generator).tolist()


def test_limits_are_the_model_s_unless_told(model_path: Path, executor: Executor) -> None:
    assert executor.vocab_size == VOCAB_SIZE
    assert executor.block_size == 16
    assert executor.max_model_len == 512
    # 2 layers, keys and values, 16 tokens, 2 heads of 16, 4 bytes.
    assert executor.num_blocks == (4 << 20) // (2 * 2 * 16 * 2 * 16 * 4)
    told = load_tiny_executor(model_path, max_model_len=100, block_size=4, max_num_seqs=3)
    assert (told.max_model_len, told.block_size) == (100, 4)


def test_without_a_size_the_kv_cache_takes_no_more_than_the_batch_can_use(model_path: Path) -> None:
    executor = load_tiny_executor(model_path, kv_memory_bytes=0, max_num_seqs=3, max_model_len=100)
    assert executor.num_blocks == 3 * 7


def test_engines_of_one_machine_share_what_is_free(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 1 << 28)
    monkeypatch.setattr(executor_module, "_MACHINE_THREADS", 4)
    threads = torch.get_num_threads()
    try:
        sizes = []
        for num_engines in (1, 2):
            executor = load_tiny_executor(
                model_path,
                kv_memory_bytes=0,
                num_threads=0,
                max_num_seqs=1024,
                max_num_batched_tokens=1024,
                num_local_engines=num_engines,
                cpu_kernels="torch",
            )
            sizes.append((executor.num_blocks, torch.get_num_threads()))
    finally:
        torch.set_num_threads(threads)
    (alone, all_threads), (shared, half_the_threads) = sizes
    assert shared == alone // 2
    assert (all_threads, half_the_threads) == (4, 2)


def test_loading_reports_its_progress(model_path: Path) -> None:
    lines: list[str] = []
    config = ExecutorConfig(2, 16, kv_memory_bytes=1 << 20, dtype="float32", cpu_kernels="torch")
    Executor.load(model_path, config, lines.append)
    assert lines == [
        "torch's own CPU kernels in float32",
        "loaded 1 of 2 layers",
        "loaded 2 of 2 layers",
        "KV cache: 128 blocks of 16 tokens, 1 MiB",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_model_len": 513}, "513, but the model was made for at most 512"),
        ({"kv_memory_bytes": 100}, "given 100 B, but one block takes 8 KiB"),
        ({"kv_memory_bytes": 1 << 50}, r"not enough memory: .* are needed, .* are free"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(model_path: Path, overrides, message) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        load_tiny_executor(model_path, **overrides)
    assert "\n" not in str(caught.value)


def test_a_model_larger_than_the_free_memory_is_refused(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 100_000)
    with pytest.raises(StartupError, match=r"MiB for the model .* 97\.66 KiB are free"):
        load_tiny_executor(model_path, kv_memory_bytes=0)


def test_an_empty_plan_and_a_plan_that_samples_nothing_give_no_tokens(executor: Executor) -> None:
    assert executor.execute(StepPlan()) == StepResult()
    start = RowStart(0, prompt_of(20), 20, GREEDY, [])
    plan = StepPlan([start], [RowStep(0, 0, 16, [0], samples=False)])
    assert executor.execute(plan) == StepResult()


def test_tokens_come_in_the_plan_s_order_and_only_for_rows_that_sample(executor: Executor) -> None:
    starts = [RowStart(row, prompt_of(10, row), 10, GREEDY, [row]) for row in range(4)]
    steps = [
        RowStep(3, 0, 10, [], samples=True),
        RowStep(0, 0, 5, [], samples=False),
        RowStep(2, 0, 10, [], samples=True),
        RowStep(1, 0, 3, [], samples=False),
    ]
    assert [token.row for token in executor.execute(StepPlan(starts, steps)).sampled] == [3, 2]


@pytest.mark.skipif(not runnable(), reason="there is no library")
def test_steps_can_be_profiled_down_to_their_ops(model_path: Path) -> None:
    executor = load_tiny_executor(model_path)
    tables: list[str] = []
    profile = StepProfile(4, tables.append)
    executor.profile_into(profile)
    for index in range(4):
        starts = [] if index else [RowStart(0, prompt_of(10), 10, GREEDY, [0])]
        step = RowStep(0, 9 + index, 1, [], True) if index else RowStep(0, 0, 10, [], True)
        profile.start()
        executor.execute(StepPlan(starts, [step]))
        profile.end(step.num_scheduled_tokens)
    (table,) = tables
    lines = [line[: line.index(" us")].rsplit(maxsplit=1)[0] for line in table.splitlines()[1:]]
    assert lines[0] == "a step of 3.2 tokens"
    assert [line for line in lines if line[:4].count(" ") == 2] == [
        "  stage",
        "  model",
        "  sample",
    ]
    assert {"    attention", "    norm", "    linear 64 x 96", "    gated linear 192 x 64"} < set(
        lines
    )


def run_chunked(executor: Executor, prompt: list[int], chunk: int, num_tokens: int) -> list:
    """One row, its prompt in chunks, in blocks that are handed out as they are needed."""
    starts, computed, result = [RowStart(1, prompt, len(prompt), SEEDED, [])], 0, []
    num_blocks, length = 0, len(prompt)
    while len(result) < num_tokens:
        count = min(chunk, length - computed)
        needed = -(-(computed + count) // 16)
        new_blocks = [100 - block for block in range(num_blocks, needed)]
        step = RowStep(1, computed, count, new_blocks, samples=computed + count == length)
        sampled = executor.execute(StepPlan(starts, [step])).sampled
        starts, num_blocks, computed = [], needed, computed + count
        if sampled:
            result.append(sampled[0])
            length += 1
    return result


@pytest.mark.parametrize("length", [15, 16, 17, 33, 150])
def test_chunks_of_any_size_give_the_same_tokens_and_logprobs_to_the_last_bit(
    executor: Executor, length: int
) -> None:
    prompt = prompt_of(length)
    whole = run_chunked(executor, prompt, 512, 12)
    for chunk in (1, 7, 16, 64):
        assert run_chunked(executor, prompt, chunk, 12) == whole


@pytest.mark.parametrize(("length", "num_cached"), [(17, 16), (32, 16), (33, 32), (40, 32)])
def test_bug_67_blocks_from_the_cache_give_the_same_tokens_and_logprobs(
    executor: Executor, length: int, num_cached: int
) -> None:
    prompt = prompt_of(length, seed=3)

    def answer(num_cached: int, blocks: list[int]) -> list[SampledToken]:
        start = RowStart(2, prompt, length, GREEDY, blocks)
        steps = [RowStep(2, num_cached, length - num_cached, [], samples=True)]
        steps += [RowStep(2, length + i, 1, [], samples=True) for i in range(8)]
        plans = [StepPlan([start], steps[:1]), *(StepPlan([], [step]) for step in steps[1:])]
        return [executor.execute(plan).sampled[0] for plan in plans]

    computed = answer(0, [5, 6, 7, 8])
    head = [5, 6, 7, 8][: num_cached // 16]
    assert answer(num_cached, [*head, 20, 21, 22]) == computed


def test_a_row_is_the_same_to_the_last_bit_alone_and_among_others(executor: Executor) -> None:
    rows = ExecutorRows(executor)
    requests = {
        row: (prompt_of(5 + 9 * row, row), SEEDED if row % 2 else GREEDY) for row in range(7)
    }
    together = rows.run(requests, 10)
    for row, request in requests.items():
        assert rows.run({row: request}, 10)[row] == together[row]


def test_a_restarted_row_keeps_nothing_of_the_request_before_it(executor: Executor) -> None:
    rows = ExecutorRows(executor)
    first = {4: (prompt_of(12, 1), SEEDED)}
    expected = rows.run(first, 8)
    penalised = dataclasses.replace(SEEDED, repetition_penalty=2.0, top_k=2, seed=8)
    rows.run({4: (prompt_of(100, 2), penalised)}, 8)
    assert rows.run(first, 8) == expected


def test_a_resumed_row_goes_on_as_if_never_stopped(executor: Executor) -> None:
    penalised = dataclasses.replace(SEEDED, frequency_penalty=1.0, repetition_penalty=1.3)
    prompt = prompt_of(30)
    rows = ExecutorRows(executor)
    whole = rows.run({0: (prompt, penalised)}, 12)[0]
    so_far = [*prompt, *(token.token_id for token in whole[:5])]
    start = RowStart(6, so_far, len(prompt), penalised, [40, 41, 42])
    plans = [StepPlan([start], [RowStep(6, 0, len(so_far), [], samples=True)])]
    plans += [StepPlan([], [RowStep(6, len(so_far) + i, 1, [], samples=True)]) for i in range(6)]
    resumed = [executor.execute(plan).sampled[0] for plan in plans]
    assert [(token.token_id, token.logprobs) for token in resumed] == [
        (token.token_id, token.logprobs) for token in whole[5:]
    ]


def prompt_logprobs_in_chunks(
    executor: Executor, prompt: list[int], chunk: int, num_top: int
) -> list[TokenLogprobs]:
    sampling = dataclasses.replace(SEEDED, prompt_logprobs=True, top_prompt_logprobs=num_top)
    starts = [RowStart(5, prompt, len(prompt), sampling, list(range(60, 80)))]
    logprobs: list[TokenLogprobs] = []
    for begin in range(0, len(prompt), chunk):
        end = min(begin + chunk, len(prompt))
        asks, samples = begin < len(prompt) - 1, end == len(prompt)
        step = RowStep(5, begin, end - begin, [], samples, asks)
        result = executor.execute(StepPlan(starts, [step]))
        assert [entry.row for entry in result.prompt_logprobs] == [5] * asks
        assert len(result.sampled) == samples
        logprobs += [logprob for entry in result.prompt_logprobs for logprob in entry.logprobs]
        starts = []
    return logprobs


@pytest.mark.parametrize("length", [2, 17, 150])
def test_prompt_logprobs_are_those_the_model_gives_each_token_when_it_comes_next(
    executor: Executor, length: int
) -> None:
    prompt, num_top = prompt_of(length), 4
    listing_all = dataclasses.replace(GREEDY, top_logprobs=VOCAB_SIZE)
    expected = []
    for end in range(1, length):
        start = RowStart(2, prompt[:end], end, listing_all, list(range(40, 50)))
        (token,) = executor.execute(StepPlan([start], [RowStep(2, 0, end, [], True)])).sampled
        assert token.logprobs is not None
        ids, logprobs = token.logprobs.top_token_ids, token.logprobs.top_logprobs
        expected.append((logprobs[ids.index(prompt[end])], ids[:num_top], logprobs[:num_top]))
    for chunk in (1, 16, 512):
        actual = prompt_logprobs_in_chunks(executor, prompt, chunk, num_top)
        assert len(actual) == len(expected) == length - 1
        for entry, (logprob, ids, logprobs) in zip(actual, expected, strict=True):
            assert entry.logprob == pytest.approx(logprob, abs=1e-4)
            assert entry.top_token_ids == ids
            assert entry.top_logprobs == pytest.approx(logprobs, abs=1e-4)


def test_prompt_logprobs_change_no_bit_of_any_row(executor: Executor) -> None:
    asking = dataclasses.replace(SEEDED, prompt_logprobs=True, top_prompt_logprobs=2)

    def run(sampling: SamplingParameters, rows: list[int]) -> dict[int, list[SampledToken]]:
        prompts = {row: prompt_of(10 + 20 * row, row) for row in rows}
        starts = [
            RowStart(row, prompt, len(prompt), sampling, list(range(8 * row, 8 * row + 8)))
            for row, prompt in prompts.items()
        ]
        # One row asks, one in two where there are several; some are in the middle of their prompt.
        steps = [
            RowStep(row, 0, len(prompt) - row % 3, [], not row % 3, bool(sampling.prompt_logprobs))
            for row, prompt in prompts.items()
        ]
        executor.execute(StepPlan(starts, steps))
        left = [RowStep(row, len(prompts[row]) - row % 3, row % 3, [], True) for row in rows]
        result = executor.execute(StepPlan([], [step for step in left if step[2]]))
        return {token.row: [token] for token in result.sampled}

    together = run(asking, [0, 1, 2, 3, 4, 5])
    assert together == run(SEEDED, [0, 1, 2, 3, 4, 5])
    for row in (1, 2, 4, 5):
        assert run(asking, [row])[row] == together[row] == run(SEEDED, [row])[row]


def test_bug_34_nan_in_one_row_fails_that_row_alone_and_leaves_no_trace(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = torch.nan
    save_file(weights, directory / "model.safetensors")
    executor = load_tiny_executor(directory)
    healthy = [token for token in prompt_of(40) if token != 77]
    rows = ExecutorRows(executor)
    expected = rows.run({0: (healthy, GREEDY)}, 5)[0]
    both = rows.run({0: (healthy, GREEDY), 1: ([5, 77, 6], GREEDY)}, 5)
    assert both[0] == expected
    assert all(token.error and token.logprobs is None for token in both[1])
    # The next owner of the block that holds the NaN does not see them.
    start = RowStart(2, healthy, len(healthy), GREEDY, [8, 9, 10])
    step = RowStep(2, 0, len(healthy), [], samples=True)
    (token,) = executor.execute(StepPlan([start], [step])).sampled
    assert token.token_id == expected[0].token_id
    assert not token.error


def test_bfloat16_runs_and_agrees_with_float32_on_what_is_likely(model_path: Path) -> None:
    prompt = prompt_of(24)
    tokens = {
        dtype: ExecutorRows(load_tiny_executor(model_path, dtype=dtype)).run(
            {0: (prompt, GREEDY)}, 1
        )[0][0]
        for dtype in ("float32", "bfloat16")
    }
    exact, rounded = tokens["float32"].logprobs, tokens["bfloat16"].logprobs
    assert exact is not None and rounded is not None
    assert exact.top_token_ids[0] == rounded.top_token_ids[0]
    assert exact.logprob == pytest.approx(rounded.logprob, abs=0.3)
