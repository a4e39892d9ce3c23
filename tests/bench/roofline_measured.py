"""What the ops of one decode step take on the device that is there, with random weights.

Matrices and caches come in as many copies as the device's cache cannot hold, as a model's layers
come, and one run of an op over all of them is one CUDA graph. On the CPU everything runs in
Triton's interpreter, so that all but the figures can be tried.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.rotary import cos_sin_table
from kernels import KernelConfig, Kernels, StoredKind, StoredMatrix, select_kernels
from kernels.gpu.kv_cache import KvFormat
from tests.bench.roofline_ops import WeightFormat

BLOCK_SIZE = 16
# Four times the largest cache of the devices in roofline_devices.py, but for the MI300X.
COPIES_BYTES = 200 << 20
MOST_COPIES = 32
NUM_REPLAYS = 10
POLICIES = {"bf16": "bfloat16", "int8": "int8", "fp8": "fp8"}
STORED = {"4-bit": (StoredKind.Q4_0, 18), "4-bit with minima": (StoredKind.Q4_1, 20)}

# An op's runs, one for each copy of what it reads.
Runs = Sequence[Callable[[], object]]


def measured_seconds(
    config: ModelConfig,
    weights: WeightFormat,
    kv_format: KvFormat,
    batch: int,
    context: int,
    device: torch.device | None = None,
) -> dict[str, float]:
    """By the names of roofline_ops.py, summed over all layers."""
    device = device or torch.device("cuda")
    policy = KernelConfig(
        POLICIES.get(weights.name, "auto"), kv=kv_format.value, implementation="triton"
    )
    with torch.inference_mode():
        step = _DecodeStep(select_kernels(device, policy), config, weights, batch, context)
        seconds: Counter[str] = Counter()
        for name, count, runs in step.ops():
            seconds[name] += count * time_runs(runs, device)
    return dict(seconds)


def time_runs(runs: Runs, device: torch.device) -> float:
    """Seconds of one of them: the median over several times all of them."""
    for run in runs:
        run()
    if device.type != "cuda":
        started = time.perf_counter()
        for run in runs:
            run()
        return (time.perf_counter() - started) / len(runs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    taken = []
    for _ in range(NUM_REPLAYS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        taken.append(started.elapsed_time(ended) / 1e3)
    return statistics.median(taken) / len(runs)


class _DecodeStep:
    """The ops of a decode step of `batch` sequences of `context` tokens."""

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        weights: WeightFormat,
        batch: int,
        context: int,
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._weights = weights
        self._batch = batch
        self._context = context

    def ops(self) -> Iterator[tuple[str, int, Runs]]:
        """Name, how often a step has it, and its runs."""
        config, kernels, layers = self._config, self._kernels, self._config.num_layers
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = config.query_size, config.kv_size
        x, residual = self._rows(hidden), self._rows(hidden)
        norm = self._rows(hidden)[0]
        ids = torch.zeros(self._batch, dtype=torch.int32, device=kernels.device)
        table = kernels.pack_embedding(self._weight(config.vocab_size, hidden, stored=False))
        yield "embedding", 1, [lambda: kernels.embedding(ids, table)]
        yield "norms", 2 * layers + 1, [lambda: kernels.add_rms_norm(x, residual, norm, 1e-5)]
        yield "q, k and v", layers, self._products(query + 2 * key, hidden)
        yield from self._attention()
        yield "output", layers, self._products(hidden, query)
        yield "gate and up", layers, self._products(2 * inner, hidden)
        gate_up = self._rows(2 * inner)
        yield "silu and mul", layers, [lambda: kernels.silu_and_mul(gate_up)]
        yield "down", layers, self._products(hidden, inner)
        head = kernels.pack_linear([self._weight(config.vocab_size, hidden)])
        yield "head", 1, [lambda: kernels.linear(x, head)]
        yield "sampling", 1, [self._sampling(kernels.linear(x, head))]

    def _attention(self) -> Iterator[tuple[str, int, Runs]]:
        config, kernels, batch = self._config, self._kernels, self._batch
        blocks_each = -(-self._context // BLOCK_SIZE)
        heads = (config.num_kv_heads, config.head_dim)
        block_bytes = kernels.kv_block_bytes(1, BLOCK_SIZE, *heads)
        copies = num_copies(block_bytes * batch * blocks_each)
        cache = kernels.allocate_kv(copies, batch * blocks_each, BLOCK_SIZE, *heads)
        for index in range(copies):
            # Random bits; of each type numbers below 2, or 64.
            cache[index].data.view(torch.uint8).random_(0, 0x40)
            if cache[index].scales is not None:
                cache[index].scales.fill_(1e-2)

        def counted(values: Tensor) -> Tensor:
            return values.to(kernels.device, torch.int32)

        block_table = counted(torch.randperm(batch * blocks_each)).view(batch, blocks_each)
        seq_lens = counted(torch.full((batch,), self._context))
        cu_seqlens, positions = counted(torch.arange(batch + 1)), seq_lens - 1
        slots = block_table[:, -1] * BLOCK_SIZE + (self._context - 1) % BLOCK_SIZE
        table = cos_sin_table(config.rope, config.head_dim, self._context, None)
        table = table.to(kernels.device)
        norms = [self._rows(config.head_dim)[0]] * 2 if config.qk_norm else [None, None]
        projected = self._rows(config.query_size + 2 * config.kv_size)
        query, key, value = projected.unflatten(1, (-1, config.head_dim)).split(
            [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        plan = kernels.plan_attention(cu_seqlens, seq_lens, block_table, BLOCK_SIZE)

        def rotate(layer: int) -> None:
            kernels.rope_and_cache(
                *(query, positions, key, value, positions, table, cache[layer], slots),
                *(*norms, 1e-5),
            )

        def attend(layer: int, window: int) -> None:
            kernels.paged_attention(query, cache[layer], plan, config.head_dim**-0.5, window)

        every = range(copies)
        yield "rope and cache", config.num_layers, [lambda i=i: rotate(i) for i in every]
        for window, count in Counter(config.sliding_windows).items():
            yield "attention", count, [lambda i=i, w=window: attend(i, w) for i in every]

    def _sampling(self, logits: Tensor) -> Callable[[], object]:
        kernels, batch, logits = self._kernels, self._batch, logits.float()
        options = torch.tensor([[1.0], [0.0], [0.95]], device=kernels.device).repeat(1, batch)
        temperature, min_p, top_p = options.contiguous()
        top_k = torch.full((batch,), 50, dtype=torch.int64, device=kernels.device)
        seeds = torch.arange(batch, device=kernels.device)
        return lambda: kernels.sample(logits, temperature, min_p, top_k, top_p, seeds, seeds)

    def _products(self, rows: int, columns: int) -> Runs:
        kernels, x = self._kernels, self._rows(columns)
        first = kernels.pack_linear([self._weight(rows, columns)])
        packed = [first]
        for _ in range(num_copies(first.num_bytes) - 1):
            packed.append(kernels.pack_linear([self._weight(rows, columns)]))
        return [lambda p=p: kernels.linear(x, p) for p in packed]

    def _rows(self, width: int) -> Tensor:
        rows = torch.randn(self._batch, width, dtype=self._kernels.dtype)
        return rows.to(self._kernels.device)

    def _weight(self, rows: int, columns: int, stored: bool = True) -> Tensor | StoredMatrix:
        if stored and self._weights.name in STORED:
            kind, group_bytes = STORED[self._weights.name]
            data = np.random.default_rng(0).integers(
                0, 0x3C, (rows, columns // 32 * group_bytes), dtype=np.uint8
            )
            return StoredMatrix(kind, data, columns)
        weight = torch.empty(rows, columns, dtype=self._kernels.dtype, device=self._kernels.device)
        return weight.normal_(std=columns**-0.5)


def num_copies(num_bytes: int) -> int:
    """Of something this large, so that together they do not stay in the device's cache."""
    return max(1, min(MOST_COPIES, -(-COPIES_BYTES // num_bytes)))
