"""The persistent batch: what compute keeps of each row between steps, and a step's tensors from it.

Rows change by what a plan brings (loops over rows); the tensors of a step are then gathered from
the arrays at once, however many tokens it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.sampling_rows import SamplingInputs, SamplingRows
from engine_svc.planning.step import RowStart, RowStep, StepPlan


class PromptTargets(NamedTuple):
    """The prompt tokens whose log-probabilities a step is asked for, `P` of `r` rows, in order."""

    rows: list[int]  # [r]
    counts: list[int]  # [r]: how many of the P are of each row
    num_top: list[int]  # [P]: how many of the likeliest tokens to list beside each
    kept_places: Tensor  # int64 [P] of the K: the token before each
    token_ids: Tensor  # int64 [P]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step: `n` sequences, `T` tokens laid end to end.

    `K` tokens of `k` sequences are kept to the end of the last layer: the last of a sequence that
    samples, and its drafts; all of one whose prompt is asked about. `s` tokens are sampled after.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]: where each token's key and value go
    cu_seqlens: Tensor  # int64 [n + 1]: where each sequence's tokens begin, and T
    seq_lens: Tensor  # int64 [n]: tokens of each sequence once this step is computed
    block_table: Tensor  # int64 [n, most blocks of any]; unused entries arbitrary
    kept_sequences: Tensor  # int64 [k] of the n
    kept_indices: Tensor  # int64 [K] of the T: the last tokens of each kept sequence
    kept_cu_seqlens: Tensor  # int64 [k + 1]: where each kept sequence's tokens begin, and K
    sampled_sequences: Tensor  # int64 [s] of the n: that of each token that is sampled after
    sampled_lens: Tensor  # int64 [s]: tokens of that sequence up to it
    sample_places: Tensor  # int64 [s] of the K: the token itself
    prompt_targets: PromptTargets | None  # None when nobody asks

    @property
    def keeps_every_token(self) -> bool:
        return len(self.kept_indices) == len(self.token_ids)


class PersistentBatch:
    """Rows [0, max_num_seqs), each with its tokens, blocks and sampling parameters."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int
    ) -> None:
        self._block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # zeros() takes memory only where it is written, so long contexts cost nothing unused.
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._block_table = np.zeros((max_num_seqs, max_blocks), np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._prompt_lens = np.zeros(max_num_seqs, np.int64)
        self._num_top_prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self._sampling = SamplingRows(self._token_ids, self._prompt_lens, vocab_size)

    @property
    def max_model_len(self) -> int:
        return int(self._token_ids.shape[1])

    def apply(self, plan: StepPlan) -> StepInputs:
        """Takes over what the plan changes and gathers the tensors of its step."""
        for start in plan.starts:
            self._start(start)
        for step in plan.steps:
            if step.new_block_ids:
                self._append_blocks(step.row, step.new_block_ids)
            if step.draft_token_ids:
                self._append_drafts(step)
        return self._gather(plan.steps)

    def append(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Writes a sampled token at its position in each of `rows`; all int64 [s].

        Of a row with drafts those behind the accepted ones are overwritten before they are read.
        The token at the end of the longest sequence has no place, and needs none.
        """
        fits = positions < self.max_model_len
        self._token_ids[rows[fits], positions[fits]] = token_ids[fits]

    def sampling_inputs(self, rows: np.ndarray, seq_lens: np.ndarray) -> SamplingInputs:
        """What the sampler must know of `rows`, which hold `seq_lens` tokens; both int64 [s]."""
        return self._sampling.gather(rows, seq_lens)

    def _start(self, start: RowStart) -> None:
        row = start.row
        self._token_ids[row, : len(start.token_ids)] = start.token_ids
        self._prompt_lens[row] = start.num_prompt_tokens
        self._num_top_prompt_logprobs[row] = start.sampling.top_prompt_logprobs
        self._num_blocks[row] = 0
        self._append_blocks(row, start.block_ids)
        self._sampling.start(row, start.sampling)

    def _append_drafts(self, step: RowStep) -> None:
        end = step.num_computed_tokens + step.num_scheduled_tokens
        self._token_ids[step.row, end - len(step.draft_token_ids) : end] = step.draft_token_ids

    def _append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        first = self._num_blocks[row]
        self._block_table[row, first : first + len(block_ids)] = block_ids
        self._num_blocks[row] += len(block_ids)

    def _gather(self, steps: Sequence[RowStep]) -> StepInputs:
        table = np.array(
            [
                (row, computed, count, samples + len(drafts), of)
                for row, computed, count, _, samples, of, drafts in steps
            ],
            np.int64,
        ).reshape(-1, 5)
        rows, num_computed, num_scheduled, num_sampled, asks = np.ascontiguousarray(table.T)
        cu_seqlens = np.concatenate([[0], np.cumsum(num_scheduled)])
        sequences = np.repeat(np.arange(len(rows)), num_scheduled)
        offsets = np.arange(cu_seqlens[-1]) - cu_seqlens[sequences]
        positions = num_computed[sequences] + offsets
        token_rows = rows[sequences]
        blocks = self._block_table[token_rows, positions // self._block_size]
        seq_lens = num_computed + num_scheduled
        most_blocks = -(-int(seq_lens.max(initial=0)) // self._block_size)
        # Of a sequence whose prompt is asked about, all tokens are kept: attention takes the last.
        num_kept = np.where(asks, num_scheduled, num_sampled)
        kept_sequences = np.flatnonzero(num_kept)
        num_kept = num_kept[kept_sequences]
        kept_cu_seqlens = np.concatenate([[0], np.cumsum(num_kept)])
        first_kept = cu_seqlens[kept_sequences + 1] - num_kept
        kept_indices = _ranges(first_kept, num_kept)
        prompt_targets = None
        if asks.any():
            prompt_targets = self._prompt_targets(
                rows[kept_sequences],
                num_computed[kept_sequences],
                np.where(asks[kept_sequences], num_kept, 0),
                kept_cu_seqlens[:-1],
            )
        return StepInputs(
            token_ids=torch.from_numpy(self._token_ids[token_rows, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(blocks * self._block_size + positions % self._block_size),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=torch.from_numpy(self._block_table[rows, :most_blocks]),
            kept_sequences=torch.from_numpy(kept_sequences),
            kept_indices=torch.from_numpy(kept_indices),
            kept_cu_seqlens=torch.from_numpy(kept_cu_seqlens),
            sampled_sequences=torch.from_numpy(np.repeat(np.arange(len(rows)), num_sampled)),
            sampled_lens=torch.from_numpy(_ranges(seq_lens - num_sampled + 1, num_sampled)),
            sample_places=torch.from_numpy(
                _ranges(
                    kept_cu_seqlens[1:] - num_sampled[kept_sequences], num_sampled[kept_sequences]
                )
            ),
            prompt_targets=prompt_targets,
        )

    def _prompt_targets(
        self,
        rows: np.ndarray,
        num_computed: np.ndarray,
        num_asked: np.ndarray,
        first_places: np.ndarray,
    ) -> PromptTargets:
        """The targets of kept sequences, all int64 [k].

        Of the tokens from `num_computed` on, the first `num_asked` are asked about as far as a
        prompt token follows them; among the kept ones they begin at `first_places`.
        """
        counts = np.clip(self._prompt_lens[rows] - 1 - num_computed, 0, num_asked)
        of_row = np.repeat(rows, counts)
        has_any = counts > 0
        return PromptTargets(
            rows=rows[has_any].tolist(),
            counts=counts[has_any].tolist(),
            num_top=self._num_top_prompt_logprobs[of_row].tolist(),
            kept_places=torch.from_numpy(_ranges(first_places, counts)),
            token_ids=torch.from_numpy(
                self._token_ids[of_row, _ranges(num_computed + 1, counts)].astype(np.int64)
            ),
        )


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[first, first + count) for each of both int64 [k], laid end to end."""
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(firsts - ends + counts, counts)
