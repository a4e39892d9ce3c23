"""A model without weights: the real executor, rows and sampler over logits that a test gives."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.executor import Executor
from engine_svc.compute.persistent_batch import PersistentBatch
from engine_svc.compute.sampler import Sampler
from engine_svc.compute.step_tensors import StagedInputs, StepCounts
from engine_svc.planning.limits import SchedulerConfig
from kernels import select_kernels
from tests.fakes.scheduler_driver import SchedulerDriver

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 8, 128, 4


class StubRunner:
    """Stands in for a model: the logits after a token are a function of that token alone."""

    max_rows = 64
    uses_torch = True

    def __init__(self, logits_after: Callable[[Tensor], Tensor], staged: StagedInputs) -> None:
        self._logits_after = logits_after
        self._staged = staged
        self._kept = torch.empty(0)

    def forward(self, counts: StepCounts, wants_all: bool) -> None:
        inputs = self._staged.of_step(counts)
        self._kept = inputs.token_ids[inputs.kept_indices]

    def logits(self, places: np.ndarray) -> Tensor:
        return self._logits_after(self._kept[torch.from_numpy(places)].long())

    def profile_ops(self) -> None:
        """There are none."""

    def take_op_seconds(self) -> Mapping[str, float]:
        return {}


def stub_driver(
    logits_after: Callable[[Tensor], Tensor],
    vocab_size: int,
    *,
    num_blocks: int = 200,
    max_num_batched_tokens: int = 64,
) -> SchedulerDriver:
    """A scheduler before it; `logits_after` maps token ids [n] to float32 [n, vocab_size]."""
    batch = PersistentBatch(
        MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size, max_num_batched_tokens
    )
    executor = Executor(
        StubRunner(logits_after, batch.staged),
        Sampler(select_kernels(torch.device("cpu"))),
        batch,
        num_blocks,
    )
    config = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        max_waiting=100,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    return SchedulerDriver(config, executor.execute)


def equal_logits(vocab_size: int) -> Callable[[Tensor], Tensor]:
    return lambda token_ids: torch.zeros(len(token_ids), vocab_size)


def fixed_logits(vocab_size: int, seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Different logits after each token id."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab_size, vocab_size, generator=generator) * 2
    return lambda token_ids: table[token_ids]
