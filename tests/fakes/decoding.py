"""Drives the compute half by hand: one sequence through a Decoder, or rows through an Executor."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.compute.kv_storage import KvStorage
from engine_svc.compute.model.decoder import Decoder
from engine_svc.compute.model.rotary import cos_sin_table
from engine_svc.compute.model.weights import WeightSource, load_weights
from engine_svc.compute.model_runner import make_runner
from engine_svc.compute.persistent_batch import PersistentBatch
from engine_svc.planning.step import (
    RowStart,
    RowStep,
    SampledToken,
    SamplingParameters,
    StepPlan,
)
from kernels import KernelConfig, KvCache, select_kernels
from kernels.gpu.kv_cache import GpuKvCache

BLOCK_SIZE = 16


def load_tiny_executor(directory: Path, **overrides: object) -> Executor:
    """An Executor with 8 rows and 4 MiB of KV cache on at most two threads."""
    settings: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_memory_bytes": 4 << 20,
        "num_threads": 2,
        "dtype": "float32",
    }
    config = ExecutorConfig(**(settings | overrides))  # type: ignore[arg-type]
    return Executor.load(directory, config, report=lambda line: None)


def fill_with_nan(layers: KvCache) -> None:
    """So that whatever reads a slot before it is written shows."""
    if isinstance(layers, GpuKvCache):
        pieces = [layers.data] if layers.scales is None else [layers.data, layers.scales]
    else:
        pieces = [layers if isinstance(layers, Tensor) else layers.memory]  # type: ignore[attr-defined]
    for memory in pieces:
        # All bits set are a NaN in every floating type.
        memory.view(torch.uint8).fill_(0xFF)


class SequenceLogits:
    """A model that gives the logits after each chunk of one sequence, by its own KV cache.

    `kernels` computes in float32, unless told.
    """

    def __init__(self, source: WeightSource, kernels: KernelConfig | None = None) -> None:
        torch.set_num_threads(2)
        ops = select_kernels(torch.device("cpu"), kernels or KernelConfig("float32"))
        config = source.config
        num_blocks = -(-config.max_model_len // BLOCK_SIZE)
        with torch.inference_mode():
            weights = load_weights(source, ops, ops.dtype, report=lambda line: None)
            table = cos_sin_table(
                config.rope, config.head_dim, config.max_model_len, source.rope_frequency_factors()
            )
            kv = KvStorage.allocate(ops, config, num_blocks, BLOCK_SIZE)
            fill_with_nan(kv.layers)
            self._batch = PersistentBatch(
                1, config.max_model_len, BLOCK_SIZE, config.vocab_size, config.max_model_len
            )
            decoder = Decoder(ops, config, weights, table)
            self._runner = make_runner(ops, decoder, kv, self._batch.staged, max_rows=1)
        self._blocks = list(reversed(range(num_blocks)))

    @torch.inference_mode()
    def after_chunks(self, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """The logits after each of `chunks` (their sizes) of `token_ids` -> [chunks, vocab]."""
        sampling = SamplingParameters(max_tokens=1)
        starts = [RowStart(0, token_ids, len(token_ids), sampling, self._blocks)]
        num_computed, logits = 0, []
        for size in chunks:
            step = RowStep(0, num_computed, size, [], samples=True)
            layout = self._batch.apply(StepPlan(starts, [step]))
            self._runner.forward(layout.counts, layout.samples_after_all)
            logits.append(self._runner.logits(layout.sample_places)[0].clone())
            starts, num_computed = [], num_computed + size
        return torch.stack(logits)


class ExecutorRows:
    """Rows of an Executor, each with its own blocks; starts and runs them step by step."""

    def __init__(self, executor: Executor, blocks_per_row: int = 8) -> None:
        self._executor = executor
        self._blocks_per_row = blocks_per_row

    def run(
        self,
        requests: dict[int, tuple[Sequence[int], SamplingParameters]],
        num_tokens: int,
    ) -> dict[int, list[SampledToken]]:
        """Starts requests in rows, in this order, and samples `num_tokens` tokens of each."""
        starts, steps = [], []
        for row, (prompt, sampling) in requests.items():
            first = row * self._blocks_per_row
            blocks = range(first, first + self._blocks_per_row)
            starts.append(RowStart(row, prompt, len(prompt), sampling, list(blocks)))
            steps.append(RowStep(row, 0, len(prompt), [], samples=True))
        result: dict[int, list[SampledToken]] = {row: [] for row in requests}
        for index in range(num_tokens):
            for sampled in self._executor.execute(StepPlan(starts, steps)).sampled:
                result[sampled.row].append(sampled)
            starts = []
            steps = [
                RowStep(row, len(prompt) + index, 1, [], samples=True)
                for row, (prompt, _) in requests.items()
            ]
        return result
