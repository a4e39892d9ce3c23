"""A model without weights: the real executor, rows and sampler over logits that a test gives."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_svc.compute.executor import Executor
from engine_svc.compute.sampler import Sampler
from engine_svc.compute.step_tensors import PersistentBatch, StepInputs
from engine_svc.planning.limits import SchedulerConfig
from kernels import select_kernels
from tests.fakes.scheduler_driver import SchedulerDriver

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 8, 128, 4


class StubDecoder:
    """Stands in for a Decoder: the logits after a token are a function of that token alone."""

    def __init__(self, logits_after: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._logits_after = logits_after

    def forward(self, inputs: StepInputs, kv_cache: Tensor) -> Tensor:
        """The token ids themselves, [K, 1], of those kept."""
        return inputs.token_ids[inputs.kept_indices][:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits_after(hidden[:, 0])


def stub_driver(
    logits_after: Callable[[Tensor], Tensor],
    vocab_size: int,
    *,
    num_blocks: int = 200,
    max_num_batched_tokens: int = 64,
) -> SchedulerDriver:
    """A scheduler before it; `logits_after` maps token ids [n] to float32 [n, vocab_size]."""
    executor = Executor(
        StubDecoder(logits_after, vocab_size),  # type: ignore[arg-type]
        Sampler(select_kernels(torch.device("cpu"))),
        torch.zeros(1, 2, num_blocks, BLOCK_SIZE, 1, 1),
        PersistentBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size),
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
