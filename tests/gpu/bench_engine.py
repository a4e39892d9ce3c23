"""A model of random weights on the device: decode steps beside the roofline, prompts beside the
matrix peak, the sampler's share, and how long the device waits for the host."""

import dataclasses
import time
from collections.abc import Sequence

import torch

from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.devices import StepGraph
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.planning.step import SamplingParameters
from kernels.gpu.kv_cache import KvFormat
from tests.bench.roofline import Roofline
from tests.bench.roofline_devices import DeviceFigures
from tests.bench.roofline_ops import WEIGHTS, Sequences
from tests.gpu.engine_line import Rows, random_prompt, run_plans
from tests.gpu.machine import Machine, data_sheet, measured_figures
from tests.gpu.random_model import load_random, triton_config
from tests.gpu.records import Goal, Recorder

DECODE = Goal("decode step: 80 % of the roofline at batch 1 and 64", at_least=0.80)
PREFILL = Goal("prefill: 60 % of the measured matrix peak", at_least=0.60)
SAMPLER = Goal("sampler: at most 3 % of a step at batch 256", at_most=0.03)
IDLE = Goal("decode: the GPU idle at most 3 %", at_most=0.03)
# (sequences, tokens of each)
DECODE_STEPS = (
    *((1, 4096), (64, 4096), (1, 512), (64, 512), (16, 4096), (256, 512), (256, 2048)),
    *((1, 32768), (16, 32768)),
)
FEW_STEPS = ((1, 4096), (64, 4096), (256, 512))
PROMPTS = ((1, 8192), (4, 2048), (1, 2048), (1, 512))
NUM_STEPS = 40
REPLAYS = 5
SAMPLING = {
    "plain": SamplingParameters(max_tokens=1),
    "top_k 50, top_p 0.95": SamplingParameters(max_tokens=1, top_k=50, top_p=0.95),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """An executor, what its steps are measured against, and where figures go."""

    machine: Machine
    recorder: Recorder
    executor: DeviceExecutor
    roofline: Roofline  # of the data sheet
    measured: DeviceFigures
    has_goals: bool

    def decode(self, batch: int, context: int, sampling: str = "plain") -> None:
        """A decode step: what its graphs take by themselves, and what it takes in a line of them.

        Keys and values are as they lie in the cache.
        """
        machine, recorder = self.machine, self.recorder
        name = f"decode, batch {batch}, context {context}"
        if sampling != "plain":
            name += f", {sampling}"
        num_steps = NUM_STEPS if machine.is_gpu else 3
        vocab_size = machine.config.vocab_size
        requests = [
            (random_prompt(context, vocab_size, row), SAMPLING[sampling]) for row in range(batch)
        ]
        rows = Rows(self.executor, requests, num_steps)
        if not rows.fits:
            recorder.skip(name, f"{self.executor.num_blocks} KV blocks are too few")
            return
        plans = rows.plans(num_computed=context - 1)
        num_warm = num_steps // 4
        run_plans(self.executor.launch, plans[:num_warm], in_flight=2)
        machine.synchronize()
        started = time.perf_counter()
        run_plans(self.executor.launch, plans[num_warm:], in_flight=2)
        step_seconds = (time.perf_counter() - started) / (num_steps - num_warm)
        self._decode_measures(name, batch, context, step_seconds, sampling)

    def _decode_measures(
        self, name: str, batch: int, context: int, step_seconds: float, sampling: str
    ) -> None:
        recorder, roofline = self.recorder, self.roofline
        graph = self.executor._graphs[self.executor._graphs.padded_size(batch)]
        with self.executor._device.computing():
            whole = self._replay_seconds(graph.model, graph.draw)
            drawing = self._replay_seconds(graph.draw)
        recorder.measure(f"{name}: a step", step_seconds * 1e3, "ms")
        recorder.measure(f"{name}: on the device", whole * 1e3, "ms")
        least = roofline.decode_seconds(batch, context)
        can = dataclasses.replace(roofline, device=self.measured).decode_seconds(batch, context)
        is_judged = self._is_judged(batch in (1, 64))
        share = f"{name}: share of the roofline"
        recorder.measure(f"{share}, as measured", can / whole, "", DECODE if is_judged else None)
        recorder.measure(f"{share}, by the data sheet", least / whole)
        sampler_goal = SAMPLER if self._is_judged(batch == 256) else None
        recorder.measure(f"{name}: the sampler's share", drawing / whole, "", sampler_goal)
        idle = max(0.0, 1 - whole / step_seconds)
        recorder.measure(f"{name}: idle", idle, "", IDLE if is_judged else None)

    def _is_judged(self, is_large: bool) -> bool:
        """Whether there is a goal for this; in a rehearsal nothing is large."""
        return self.has_goals and (is_large or not self.machine.is_gpu)

    def _replay_seconds(self, *graphs: StepGraph) -> float:
        """What the device takes for them, queued several times, so that it need not wait."""
        count = REPLAYS if self.machine.is_gpu else 1

        def replay() -> None:
            for _ in range(count):
                for graph in graphs:
                    graph.replay()

        return self.machine.seconds(replay) / count

    def prefill(self, count: int, length: int) -> None:
        """`count` prompts of so many tokens, computed in one step."""
        machine, recorder = self.machine, self.recorder
        name = f"prefill, {count} x {length} tokens"
        vocab_size = machine.config.vocab_size
        requests = [
            (random_prompt(length, vocab_size, row), SAMPLING["plain"]) for row in range(count)
        ]
        rows = Rows(self.executor, requests, 1)
        (plan,) = rows.plans()
        with self.executor._device.computing():
            seconds = machine.seconds(lambda: self.executor.launch(plan).wait(), repeats=3)
        flops = sum(op.count * op.flops for op in self.roofline.ops.of(Sequences(count, length, 0)))
        recorder.measure(f"{name}: tokens per second", count * length / seconds, "1/s")
        recorder.measure(f"{name}: products", flops / seconds / 1e12, "TFLOP/s")
        is_judged = self._is_judged(count * length >= 8192)
        share = f"{name}: share of the measured matrix peak"
        goal = PREFILL if is_judged else None
        recorder.measure(share, flops / seconds / self.measured.flops, "", goal)


def bench_bfloat16(machine: Machine, recorder: Recorder) -> None:
    bench = dataclasses.replace(_load(machine, recorder, "bf16"), has_goals=True)
    steps = DECODE_STEPS if machine.is_gpu else ((2, 8),)
    _run(bench, steps[:2], ((1, 8192),) if machine.is_gpu else ((1, 9),))
    _run(bench, steps[2:], PROMPTS[1:] if machine.is_gpu else ())
    with recorder.case("the sampler with filters"):
        bench.decode(*((256, 512) if machine.is_gpu else (2, 8)), "top_k 50, top_p 0.95")


def bench_invariant(machine: Machine, recorder: Recorder) -> None:
    """What batch-invariant mode costs is what this takes beside `bench_bfloat16`."""
    bench = _load(machine, recorder, "bf16", batch_invariant=True)
    _run_few(bench)


def bench_fp8(machine: Machine, recorder: Recorder) -> None:
    _run_few(_load(machine, recorder, "fp8", weights="fp8", kv="fp8"))


def bench_4_bit(machine: Machine, recorder: Recorder) -> None:
    _run_few(_load(machine, recorder, "4bit"))


def _run_few(bench: Bench) -> None:
    is_gpu = bench.machine.is_gpu
    prompts = ((1, 8192),) if is_gpu else ()
    _run(bench, FEW_STEPS if is_gpu else ((2, 8),), prompts)


def _run(
    bench: Bench, steps: Sequence[tuple[int, int]], prompts: Sequence[tuple[int, int]]
) -> None:
    for batch, context in steps:
        with bench.recorder.case(f"decode, batch {batch}, context {context}"):
            bench.decode(batch, context)
    for count, length in prompts:
        with bench.recorder.case(f"prefill, {count} x {length} tokens"):
            bench.prefill(count, length)


def _load(machine: Machine, recorder: Recorder, kind: str, **kernels: object) -> Bench:
    """`kind` is one of WEIGHTS."""
    measured = measured_figures(machine)
    recorder.measure("copied", measured.bytes_per_second / 1e12, "TB/s")
    recorder.measure("matrix peak", measured.flops / 1e12, "TFLOP/s")
    started = time.monotonic()
    is_gpu = machine.is_gpu
    kv_format = KvFormat(str(kernels.get("kv", "bfloat16")))
    executor = load_random(
        machine,
        machine.config,
        triton_config(**kernels),
        ExecutorConfig(
            max_num_seqs=256 if is_gpu else 2,
            max_num_batched_tokens=8192 if is_gpu else 16,
            max_model_len=40960 if is_gpu else 32,
            kv_memory_bytes=0 if is_gpu else 1 << 18,
        ),
        stored_as_4_bits=kind == "4bit",
    )
    recorder.measure("loaded, with graphs", time.monotonic() - started, "s")
    recorder.measure("KV blocks", executor.num_blocks)
    with torch.inference_mode():
        _fill_cache(executor, kv_format)
    roofline = Roofline(machine.config, data_sheet(machine), WEIGHTS[kind], kv_format)
    return Bench(machine, recorder, executor, roofline, measured, has_goals=False)


def _fill_cache(executor: DeviceExecutor, kv_format: KvFormat) -> None:
    """Numbers as a cache holds them, one layer after the other; what is free may hold NaN."""
    storage = executor._model._kv
    assert storage is not None
    for layer in storage.layers:
        if kv_format.has_scales:
            # Any bits but those of a NaN.
            layer.data.view(torch.uint8).random_(0, 0x70)
            layer.scales.fill_(1e-2)
        else:
            layer.data.normal_()
