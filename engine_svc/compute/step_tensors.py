"""A step's tensors: whole, as large as the largest step, and the parts that one step uses."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class StepCounts(NamedTuple):
    """How much a step computes: what a captured step is told."""

    num_tokens: int  # T
    num_kept_tokens: int  # K
    num_sequences: int  # n
    num_kept_sequences: int  # k


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step, int32: `n` sequences, `T` tokens laid end to end.

    `K` tokens of `k` sequences are kept to the end of the last layer: of a sequence that samples
    the last and its drafts, all of one whose prompt is asked about.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]: where each token's key and value go
    cu_seqlens: Tensor  # [n + 1]: where each sequence's tokens begin, and T
    rows: Tensor  # [n]: the row of each sequence in the batch
    kept_indices: Tensor  # [K] of the T: the last tokens of each kept sequence
    kept_positions: Tensor  # [K]
    kept_cu_seqlens: Tensor  # [k + 1]: where each kept sequence's tokens begin, and K
    kept_rows: Tensor  # [k]
    # By row of the batch, with arbitrary values in rows that the step has not.
    seq_lens: Tensor  # [rows]: tokens once this step is computed
    block_table: Tensor  # [rows, most blocks]
    # Set only when that is so: K and T, k and n then are the same.
    keeps_every_token: bool = False

    @property
    def counted(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors whose lengths `StepCounts` gives, in its order."""
        return (
            (self.token_ids, self.positions, self.slot_mapping),
            (self.kept_indices, self.kept_positions),
            (self.rows,),
            (self.kept_rows,),
        )


class StagedInputs:
    """Memory for the tensors of any step, always the same, which a captured step reads.

    The arrays are those tensors, for numpy to fill. `block_table` int32 [rows, most blocks] is the
    batch's own.
    """

    def __init__(self, max_tokens: int, block_table: np.ndarray) -> None:
        max_sequences = len(block_table)

        def staged(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32)

        self.whole = StepInputs(
            token_ids=staged(max_tokens),
            positions=staged(max_tokens),
            slot_mapping=staged(max_tokens),
            cu_seqlens=staged(max_sequences + 1),
            rows=staged(max_sequences),
            kept_indices=staged(max_tokens),
            kept_positions=staged(max_tokens),
            kept_cu_seqlens=staged(max_sequences + 1),
            kept_rows=staged(max_sequences),
            seq_lens=staged(max_sequences),
            block_table=torch.from_numpy(block_table),
        )
        self.token_ids = self.whole.token_ids.numpy()
        self.positions = self.whole.positions.numpy()
        self.slot_mapping = self.whole.slot_mapping.numpy()
        self.cu_seqlens = self.whole.cu_seqlens.numpy()
        self.rows = self.whole.rows.numpy()
        self.kept_indices = self.whole.kept_indices.numpy()
        self.kept_positions = self.whole.kept_positions.numpy()
        self.kept_cu_seqlens = self.whole.kept_cu_seqlens.numpy()
        self.kept_rows = self.whole.kept_rows.numpy()
        self.seq_lens = self.whole.seq_lens.numpy()

    def of_step(self, counts: StepCounts) -> StepInputs:
        """The tensors of the step that was written last; they change with the next."""
        whole, (tokens, kept_tokens, sequences, kept_sequences) = self.whole, counts
        return StepInputs(
            token_ids=whole.token_ids[:tokens],
            positions=whole.positions[:tokens],
            slot_mapping=whole.slot_mapping[:tokens],
            cu_seqlens=whole.cu_seqlens[: sequences + 1],
            rows=whole.rows[:sequences],
            kept_indices=whole.kept_indices[:kept_tokens],
            kept_positions=whole.kept_positions[:kept_tokens],
            kept_cu_seqlens=whole.kept_cu_seqlens[: kept_sequences + 1],
            kept_rows=whole.kept_rows[:kept_sequences],
            seq_lens=whole.seq_lens,
            block_table=whole.block_table,
            keeps_every_token=tokens == kept_tokens,
        )
