"""The executor of a device gives what that of the CPU does: however steps are cut, padded, captured
and queued, and whatever requests ask for.
"""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.executor import Executor
from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.step import (
    RowStart,
    RowStep,
    SamplingError,
    SamplingParameters,
    StepPlan,
    StepResult,
)
from tests.fakes.decoding import ExecutorRows, load_tiny_executor
from tests.fakes.device_decoding import StepLine, load_device_executor
from tests.fakes.grammars import byte_level_compiler, regex
from tests.fakes.scheduler_driver import Received
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama
from tests.fakes.tiny_tokenizers import IM_END

GREEDY = SamplingParameters(max_tokens=20, temperature=0.0, logprobs=True, top_logprobs=3)
SEEDED = dataclasses.replace(GREEDY, temperature=1.0, seed=5)
# Every option, several of them in one request.
OPTIONS = (
    {},
    {"temperature": 0.0},
    {"logprobs": True, "top_logprobs": 4},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": ((7, 3.0), (9, -100.0)), "min_tokens": 6, "eos_token_ids": frozenset({3, 7})},
    {"allowed_token_ids": frozenset(range(0, VOCAB_SIZE, 2)), "bad_words": ((2, 4), (8,))},
    {"prompt_logprobs": True, "top_prompt_logprobs": 2, "top_k": 5, "top_p": 0.8, "min_p": 0.01},
    # Neither is planned while a step of it is in flight.
    {"grammar": regex("(yes|no)[a-z]{3,6}!"), "eos_token_ids": frozenset({IM_END})},
    {"allowed_token_ids": frozenset({4, 5}), "bad_words": ((4, 4), (5, 5), (4, 5))},
    {
        **{"repetition_penalty": 1.2, "logprobs": True, "prompt_logprobs": True},
        **{"allowed_token_ids": frozenset(range(100)), "logit_bias": ((11, 4.0),)},
    },
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with byte_level_compiler() as compiler:
        yield compiler


@pytest.fixture(scope="module")
def device(model_path: Path, compiler: GrammarCompiler) -> DeviceExecutor:
    executor = load_device_executor(model_path)
    executor.follow_grammars(compiler)
    return executor


@pytest.fixture(scope="module")
def host(model_path: Path, compiler: GrammarCompiler) -> Executor:
    executor = load_on_host(model_path)
    executor.follow_grammars(compiler)
    return executor


def load_on_host(directory: Path, **overrides: object) -> Executor:
    return load_tiny_executor(directory, cpu_kernels="torch", num_threads=1, **overrides)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE - 2, (length,), generator=generator).tolist()


def limits(executor: DeviceExecutor | Executor, **overrides: int) -> SchedulerConfig:
    values = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": executor.max_model_len,
        "max_waiting": 100,
        "num_blocks": executor.num_blocks,
        "block_size": executor.block_size,
        "max_steps_in_flight": executor.max_steps_in_flight,
    }
    return SchedulerConfig(**(values | overrides))


def answers(received: list[Received]) -> list[tuple]:
    return [
        (
            *(entry.token_ids, entry.logprobs, entry.prompt_logprobs),
            entry.finish and (entry.finish.reason, str(entry.finish.error)),
        )
        for entry in received
    ]


def workload(seed: int, num_requests: int) -> list[tuple[list[int], SamplingParameters]]:
    rng = random.Random(seed)
    head = prompt_of(40, 1000)
    requests = []
    for number in range(num_requests):
        length = rng.choice([1, 2, 15, 16, 17, 33, 40, 70])
        prompt = (head if rng.random() < 0.3 else []) + prompt_of(length, 100 * seed + number)
        options = rng.choice(OPTIONS)
        sampling = SamplingParameters(rng.randrange(1, 14), seed=number, **options)
        requests.append((prompt, sampling))
    return requests


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_tokens=st.sampled_from([8, 24, 64]),
    num_blocks=st.sampled_from([14, 60]),
    num_steps_between=st.integers(0, 2),
    in_flight=st.integers(1, 2),
)
def test_whatever_is_asked_and_however_it_is_planned_the_answers_are_those_of_the_cpu(
    device: DeviceExecutor,
    host: Executor,
    seed: int,
    num_tokens: int,
    num_blocks: int,
    num_steps_between: int,
    in_flight: int,
) -> None:
    requests = workload(seed, 12)
    expected = StepLine(limits(host), host.launch).run(requests)
    line = StepLine(
        limits(
            device,
            max_num_batched_tokens=num_tokens,
            num_blocks=num_blocks,
            max_steps_in_flight=in_flight,
        ),
        device.launch,
    )
    received = line.run(requests, num_steps_between=num_steps_between)
    assert line.most_in_flight == in_flight
    for actual, wanted in zip(answers(received), answers(expected), strict=True):
        assert actual == wanted


def test_preemption_and_two_steps_in_flight_change_nothing(
    device: DeviceExecutor, host: Executor
) -> None:
    requests = [(prompt_of(30, seed), dataclasses.replace(SEEDED, seed=seed)) for seed in range(8)]
    expected = StepLine(limits(host), host.launch).run(requests)
    line = StepLine(limits(device, num_blocks=14), device.launch)
    assert answers(line.run(requests)) == answers(expected)
    assert line.num_preemptions and line.most_in_flight == 2


def test_a_step_is_queued_before_the_host_knows_the_tokens_of_the_one_before(
    device: DeviceExecutor, host: Executor
) -> None:
    penalised = dataclasses.replace(SEEDED, frequency_penalty=1.0, repetition_penalty=1.3)
    requests = {0: (prompt_of(20), SEEDED), 1: (prompt_of(33, 1), penalised)}
    expected = ExecutorRows(host).run(requests, 10)
    starts, steps = [], []
    for row, (prompt, sampling) in requests.items():
        blocks = range(8 * row, 8 * row + 8)
        starts.append(RowStart(row, prompt, len(prompt), sampling, list(blocks)))
        steps.append(RowStep(row, 0, len(prompt), [], samples=True))
    pending = device.launch(StepPlan(starts, steps))
    results: list[StepResult] = []
    for index in range(9):
        steps = [
            RowStep(row, len(prompt) + index, 1, [], samples=True)
            for row, (prompt, _) in requests.items()
        ]
        following = device.launch(StepPlan([], steps))
        results.append(pending.wait())
        pending = following
    results.append(pending.wait())
    for place, row in enumerate(requests):
        assert [result.sampled[place] for result in results] == expected[row]


def test_an_empty_plan_and_a_plan_that_samples_nothing_give_no_tokens(
    device: DeviceExecutor,
) -> None:
    assert device.execute(StepPlan()) == StepResult()
    start = RowStart(0, prompt_of(20), 20, GREEDY, [])
    plan = StepPlan([start], [RowStep(0, 0, 16, [0], samples=False)])
    assert device.execute(plan) == StepResult()


def test_a_prompt_longer_than_what_a_step_s_copy_holds_gets_there(model_path: Path) -> None:
    device = load_device_executor(model_path, max_num_batched_tokens=16)
    host = load_on_host(model_path)
    requests = [(prompt_of(300), dataclasses.replace(SEEDED, repetition_penalty=1.5))]
    line = StepLine(limits(device, max_num_batched_tokens=16), device.launch)
    assert answers(line.run(requests)) == answers(StepLine(limits(host), host.launch).run(requests))


def test_a_sequence_may_reach_the_model_s_length(model_path: Path) -> None:
    device = load_device_executor(model_path, max_model_len=40)
    host = load_on_host(model_path, max_model_len=40)
    requests = [(prompt_of(30), dataclasses.replace(SEEDED, max_tokens=10)) for _ in range(3)]
    line = StepLine(limits(device), device.launch)
    assert answers(line.run(requests)) == answers(StepLine(limits(host), host.launch).run(requests))


def test_bug_34_nan_in_one_row_fails_that_row_alone_and_later_steps_can_read_its_token(
    tmp_path: Path,
) -> None:
    directory = write_tiny_llama(tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = torch.nan
    save_file(weights, directory / "model.safetensors")
    device = load_device_executor(directory)
    healthy = [token for token in prompt_of(40) if token != 77]
    rows = ExecutorRows(device)
    expected = rows.run({0: (healthy, GREEDY)}, 5)[0]
    biased = dataclasses.replace(GREEDY, logit_bias=((5, 1.0),))
    both = rows.run({0: (healthy, GREEDY), 1: ([5, 77, 6], GREEDY), 2: ([77], biased)}, 5)
    assert both[0] == expected
    for row in (1, 2):
        assert {token.error for token in both[row]} == {SamplingError.BAD_LOGITS}
        assert all(token.token_id == 0 and token.logprobs is None for token in both[row])


def test_a_row_whose_options_leave_no_token_fails_by_its_own_fault(device: DeviceExecutor) -> None:
    dead_end = dataclasses.replace(
        GREEDY, allowed_token_ids=frozenset({4}), bad_words=((4,), (9, 4))
    )
    requests = {0: (prompt_of(9), dead_end), 1: (prompt_of(5), SEEDED)}
    tokens = ExecutorRows(device).run(requests, 2)
    assert [token.error for token in tokens[0]] == [SamplingError.NO_TOKEN_LEFT] * 2
    assert [token.error for token in tokens[1]] == [None] * 2
