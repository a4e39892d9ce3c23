"""A GPU's executor: on one, or rehearsed, kernels interpreted, graphs under a capture's rules.

Loading captures each size of the ladder, and a replay is held to the same rules: an op that waits
for the device, makes memory or is sized by data fails the test that comes upon it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.compute.decode_graphs import DecodeGraphs
from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.devices import Device, HostDevice
from engine_svc.compute.executor import Executor
from engine_svc.compute.graph_rehearsal import CaptureError, CaptureRules
from engine_svc.planning.step import RowStart, RowStep, SampledToken, SamplingParameters, StepPlan
from kernels import KernelConfig, Kernels, select_kernels
from kernels.gpu.ahead_of_time import OPS
from kernels.gpu.kv_cache import KvFormat
from kernels.gpu.variant import ModelShapes, Variant
from tests.fakes.decoding import ExecutorRows, load_tiny_executor
from tests.fakes.device_decoding import gpu_or_rehearsal, load_device_executor
from tests.fakes.kernel_launches import KernelLaunches, noting_launches
from tests.fakes.quick_interpreter import hurry
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama, write_tiny_qwen3

BLOCKS_PER_ROW = 2
SEEDED = SamplingParameters(max_tokens=20, seed=3)
GREEDY = SamplingParameters(max_tokens=20, temperature=0.0)
ASKING = SamplingParameters(
    max_tokens=20,
    seed=5,
    top_k=20,
    repetition_penalty=1.3,
    logit_bias=((3, 1.0),),
    allowed_token_ids=frozenset(range(200)),
    logprobs=True,
    top_logprobs=2,
)
# Of the tiny models.
LLAMA = ModelShapes(64, 4, 2, 16, 96, VOCAB_SIZE)
QWEN3 = dataclasses.replace(LLAMA, head_dim=32, qk_norm=True)
PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 7, 77, 50, 30], [40])


def variants_of(shapes: ModelShapes) -> list[Variant]:
    return [variant for op in OPS for variant in op.variants(shapes)]


def triton_kernels(device: Device, **config: object) -> Kernels:
    wanted = KernelConfig(implementation="triton", **config)  # type: ignore[arg-type]
    return select_kernels(device.torch_device, wanted)


def load(directory: Path, max_num_seqs: int, **config: object) -> DeviceExecutor:
    device = gpu_or_rehearsal()
    return load_device_executor(
        directory,
        triton_kernels(device, **config),
        device,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=15,
        max_model_len=48,
    )


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        hurry(monkeypatch)
        yield


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def launches() -> Iterator[KernelLaunches]:
    with noting_launches() as launches:
        yield launches


@pytest.fixture(scope="module")
def device(model_path: Path, launches: KernelLaunches) -> DeviceExecutor:
    return load(model_path, 4, weights="float32")


@pytest.fixture(scope="module")
def host(model_path: Path) -> Executor:
    return load_tiny_executor(model_path, cpu_kernels="torch", num_threads=1)


def assert_same(actual: list[SampledToken], expected: list[SampledToken]) -> None:
    assert [token.token_id for token in actual] == [token.token_id for token in expected]
    for token, other in zip(actual, expected, strict=True):
        assert (token.logprobs is None) == (other.logprobs is None)
        if token.logprobs is not None and other.logprobs is not None:
            assert token.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            assert token.logprobs.top_token_ids == other.logprobs.top_token_ids


def test_the_rehearsal_gives_what_the_cpu_does(device: DeviceExecutor, host: Executor) -> None:
    requests = dict(enumerate(zip(PROMPTS, (SEEDED, GREEDY, ASKING), strict=True)))
    # Three sequences are padded to four; without the one that asks for options all is in a graph.
    for chosen, num_tokens in (((0, 1, 2), 3), ((0, 1), 2)):
        rows = {row: requests[row] for row in chosen}
        actual = ExecutorRows(device, BLOCKS_PER_ROW).run(rows, num_tokens)
        expected = ExecutorRows(host, BLOCKS_PER_ROW).run(rows, num_tokens)
        for row in chosen:
            assert_same(actual[row], expected[row])


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")
def test_all_that_a_model_s_steps_launch_is_compiled_ahead(
    device: DeviceExecutor, launches: KernelLaunches
) -> None:
    # By then the largest step has run, and graphs of several sizes were captured.
    shapes = dataclasses.replace(LLAMA, dtype=torch.float32, kv_format=KvFormat.FLOAT32)
    start = RowStart(0, PROMPTS[0], 8, SEEDED, [0])
    device.execute(StepPlan([start], [RowStep(0, 0, 8, [], True)]))
    assert len(launches) > 12
    assert launches.not_among(variants_of(shapes)) == []


def test_a_graph_gives_what_its_ops_do_whatever_is_staged(device: DeviceExecutor) -> None:
    starts, steps = [], []
    for row, prompt in enumerate(PROMPTS):
        blocks = [BLOCKS_PER_ROW * row, BLOCKS_PER_ROW * row + 1]
        starts.append(RowStart(row, prompt, len(prompt), SEEDED, blocks))
        steps.append(RowStep(row, 0, len(prompt), [], samples=True))
    device.execute(StepPlan(starts, steps))
    graphs = device._graphs
    for rows in ((2, 0), (1, 2, 0)):
        plan = StepPlan([], [RowStep(row, len(PROMPTS[row]), 1, [], True) for row in rows])
        captured = device.execute(plan)
        try:
            device._graphs = DecodeGraphs({})
            eager = device.execute(plan)
        finally:
            device._graphs = graphs
        assert captured == eager
        assert [token.row for token in captured.sampled] == list(rows)


def test_no_step_waits_for_the_device_whatever_its_rows_ask_for(
    device: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with CaptureRules(allows_memory=True) as rules:
                result = method(*args)
            seen.extend(rules.calls)
            return result

        return call

    # All but the way of what the host has, and gets.
    for owner, name in (
        (device._model, "hidden"),
        (device._sampler, "_edit"),
        (device._sampler, "draw"),
        (device._sampler._kernels, "token_logprobs"),
        (device._sampler._kernels, "largest"),
    ):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    asking = dataclasses.replace(ASKING, prompt_logprobs=True)
    starts = [RowStart(0, PROMPTS[0], 8, asking, [0]), RowStart(1, PROMPTS[1], 6, SEEDED, [1])]
    steps = [RowStep(0, 0, 8, [], True, True), RowStep(1, 0, 6, [], True)]
    assert len(device.execute(StepPlan(starts, steps)).sampled) == 2
    assert {"aten.index_select.out", "aten.index_copy_.default"} <= {
        call.partition("(")[0] for call in seen
    }


@pytest.mark.parametrize(
    "config",
    [
        {"weights": "bfloat16", "kv": "fp8", "batch_invariant": True},
        {"weights": "int8", "kv": "int8"},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_other_types_keep_the_rules_too_and_are_compiled_ahead(
    tmp_path: Path, config: dict[str, object]
) -> None:
    with noting_launches() as launches:
        device = load(write_tiny_qwen3(tmp_path), 1, **config)
        (tokens,) = ExecutorRows(device, BLOCKS_PER_ROW).run({0: (PROMPTS[0], GREEDY)}, 2).values()
    assert all(token.error is None for token in tokens)
    shapes = dataclasses.replace(QWEN3, kv_format=KvFormat(config["kv"]))
    assert launches.not_among(variants_of(shapes)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a capture has errors of its own")
def test_an_op_that_no_graph_can_hold_is_found_when_the_model_loads(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = HostDevice(checks_graphs=True)
    kernels = triton_kernels(device, weights="float32")
    add_rms_norm = kernels.add_rms_norm
    monkeypatch.setattr(kernels, "add_rms_norm", lambda x, *others: add_rms_norm(x + 0, *others))
    with pytest.raises(CaptureError, match="makes memory"):
        load_device_executor(
            model_path,
            kernels,
            device,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=16,
        )


def test_prompts_in_chunks_and_what_is_asked_about_them(
    device: DeviceExecutor, host: Executor
) -> None:
    prompt = [7 * place % 250 for place in range(20)]
    asking = dataclasses.replace(GREEDY, prompt_logprobs=True, top_prompt_logprobs=1)
    start = RowStart(0, prompt, len(prompt), asking, [3, 0])
    plans = [
        StepPlan([start], [RowStep(0, 0, 13, [], False, True)]),
        StepPlan([], [RowStep(0, 13, 7, [], True, True)]),
    ]
    for plan in plans:
        actual, expected = device.execute(plan), host.execute(plan)
        assert [token.token_id for token in actual.sampled] == [
            token.token_id for token in expected.sampled
        ]
        (of_prompt,), (wanted,) = actual.prompt_logprobs, expected.prompt_logprobs
        for entry, other in zip(of_prompt.logprobs, wanted.logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert entry.top_token_ids == other.top_token_ids


def test_a_prompt_that_is_asked_about_in_the_middle_leaves_graphs_as_they_were(
    model_path: Path, host: Executor
) -> None:
    """More tokens are asked about than in any step that samples."""
    device = load(model_path, 4, weights="float32")
    prompt = [7 * place % 250 for place in range(20)]
    asking = dataclasses.replace(GREEDY, prompt_logprobs=True)
    starts = [RowStart(0, prompt, 20, asking, [0, 1]), RowStart(1, [40], 1, SEEDED, [2])]
    plans = [
        StepPlan(starts[:1], [RowStep(0, 0, 15, [], False, True)]),
        StepPlan(starts[1:], [RowStep(1, 0, 1, [], True)]),
    ]
    for plan in plans:
        actual, expected = device.execute(plan), host.execute(plan)
        assert actual.sampled == expected.sampled
    assert len(actual.sampled) == 1
