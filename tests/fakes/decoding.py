"""Drives the compute half by hand: one sequence through a Decoder, or rows through an Executor."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.compute.kv_storage import KvLayout
from engine_svc.compute.model.decoder import Decoder
from engine_svc.compute.model.rotary import cos_sin_table
from engine_svc.compute.model.weights import WeightSource, load_weights
from engine_svc.compute.step_tensors import PersistentBatch
from engine_svc.planning.step import (
    RowStart,
    RowStep,
    SampledToken,
    SamplingParameters,
    StepPlan,
)
from kernels import select_kernels

BLOCK_SIZE = 16


def load_tiny_executor(directory: Path, **overrides: object) -> Executor:
    """An Executor with 8 rows and 4 MiB of KV cache on at most two threads."""
    settings: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_memory_bytes": 4 << 20,
        "num_threads": 2,
    }
    config = ExecutorConfig(**(settings | overrides))  # type: ignore[arg-type]
    return Executor.load(directory, config, report=lambda line: None)


class SequenceLogits:
    """A model that gives the logits after each chunk of one sequence, by its own KV cache."""

    def __init__(self, source: WeightSource) -> None:
        torch.set_num_threads(2)
        kernels = select_kernels(torch.device("cpu"))
        config = source.config
        layout = KvLayout.of(config, BLOCK_SIZE, torch.float32)
        num_blocks = -(-config.max_model_len // BLOCK_SIZE)
        with torch.inference_mode():
            weights = load_weights(source, kernels, torch.float32, report=lambda line: None)
            table = cos_sin_table(
                config.rope, config.head_dim, config.max_model_len, source.rope_frequency_factors()
            )
            self._kv_cache = layout.allocate(num_blocks).fill_(torch.nan)
        self._decoder = Decoder(kernels, config, weights, table)
        self._batch = PersistentBatch(1, config.max_model_len, BLOCK_SIZE, config.vocab_size)
        self._blocks = list(reversed(range(num_blocks)))

    @torch.inference_mode()
    def after_chunks(self, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """The logits after each of `chunks` (their sizes) of `token_ids` -> [chunks, vocab]."""
        sampling = SamplingParameters(max_tokens=1)
        starts = [RowStart(0, token_ids, len(token_ids), sampling, self._blocks)]
        num_computed, logits = 0, []
        for size in chunks:
            step = RowStep(0, num_computed, size, [], samples=True)
            inputs = self._batch.apply(StepPlan(starts, [step]))
            hidden = self._decoder.forward(inputs, self._kv_cache)
            logits.append(self._decoder.logits(hidden)[0])
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
