"""The persistent batch: what compute keeps of each row between steps, and a step's tensors from it.

Rows change by what a plan brings (loops over rows); the tensors of a step are then gathered from
the arrays at once, however many tokens it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine_svc.compute.ranges import ranges
from engine_svc.compute.sampling_rows import SamplingInputs, SamplingRows
from engine_svc.compute.step_tensors import StagedInputs, StepCounts
from engine_svc.planning.step import RowStart, RowStep, StepPlan


class PromptTargets(NamedTuple):
    """The prompt tokens whose log-probabilities a step is asked for, `P` of `r` rows, in order."""

    rows: list[int]  # [r]
    counts: list[int]  # [r]: how many of the P are of each row
    num_top: list[int]  # [P]: how many of the likeliest tokens to list beside each
    kept_places: np.ndarray  # int64 [P] of the K: the token before each
    token_ids: np.ndarray  # int64 [P]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """What a step computes, beside the tensors in `PersistentBatch.staged`.

    `s` tokens are sampled, one after each of s kept ones.
    """

    counts: StepCounts
    sampled_rows: np.ndarray  # int64 [s]
    sampled_positions: np.ndarray  # int64 [s]: where each token will lie
    sample_places: np.ndarray  # int64 [s] of the K kept tokens: the one before each
    prompt_targets: PromptTargets | None = None  # None when nobody asks
    has_drafts: bool = False

    @property
    def samples_after_all(self) -> bool:
        """Whether every kept token is one that is sampled after, and nothing else is asked."""
        num_sampled = len(self.sample_places)
        return num_sampled == self.counts.num_kept_tokens > 0 and self.prompt_targets is None


class PersistentBatch:
    """Rows [0, max_num_seqs), each with its tokens, blocks and sampling parameters.

    A step has at most `max_num_tokens` tokens. Where the host does not know all tokens in time,
    `tokens_on_device`, `staged.token_ids` is of no use, and penalties come without theirs.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        max_num_tokens: int,
        *,
        tokens_on_device: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self._block_size = block_size
        self._max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        # zeros() takes memory only where it is written, so long contexts cost nothing unused.
        # A token more than a sequence has: what is sampled after the longest.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._prompt_lens = np.zeros(max_num_seqs, np.int64)
        self._num_top_prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self._sampling = SamplingRows(
            self._token_ids, self._prompt_lens, vocab_size, tokens_on_device=tokens_on_device
        )
        self._counting = np.arange(max_num_tokens + 1)
        # The rows of the last step, if that was of one token each: most of what is staged then
        # stays as it is.
        self._decoded_rows: tuple[int, ...] = ()
        self._decoded = np.empty(0, np.int64)
        self.staged = StagedInputs(max_num_tokens, self._block_table)

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def block_size(self) -> int:
        return self._block_size

    def apply(self, plan: StepPlan) -> StepLayout:
        """Takes over what the plan changes and gathers the tensors of its step."""
        for start in plan.starts:
            self._start(start)
        for step in plan.steps:
            if step.new_block_ids:
                self._append_blocks(step.row, step.new_block_ids)
            if step.draft_token_ids:
                self._append_drafts(step)
        return self._gather(plan.steps)

    def append(
        self, rows: np.ndarray, positions: np.ndarray, token_ids: Sequence[int] | np.ndarray
    ) -> None:
        """Writes a sampled token at its position in each of `rows`; all int64 [s].

        Of a row with drafts those behind the accepted ones are overwritten before they are read.
        The token at the end of the longest sequence goes to a place that nobody reads.
        """
        self._token_ids[rows, positions] = token_ids

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

    def _gather(self, steps: Sequence[RowStep]) -> StepLayout:
        if not steps:
            nothing = self._counting[:0]
            return StepLayout(StepCounts(0, 0, 0, 0), nothing, nothing, nothing)
        rows, num_computed, num_scheduled, _, samples, asks, drafts = zip(*steps, strict=True)
        if sum(num_scheduled) == len(rows) == sum(samples) and not any(asks):
            return self._gather_decodes(rows, np.array(num_computed))
        self._decoded_rows = ()
        num_sampled = [drawn + len(draft) for drawn, draft in zip(samples, drafts, strict=True)]
        table = np.array([rows, num_computed, num_scheduled, num_sampled, asks], np.int64)
        self._gather_tokens(*table[:3])
        return replace(self._gather_kept(*table), has_drafts=any(drafts))

    def _gather_decodes(self, rows: tuple[int, ...], positions: np.ndarray) -> StepLayout:
        """As the two that follow, where each sequence has one token, and samples after it."""
        staged, size = self.staged, len(rows)
        if rows != self._decoded_rows:
            self._decoded = staged.rows[:size] = staged.kept_rows[:size] = np.array(rows)
            staged.cu_seqlens[: size + 1] = self._counting[: size + 1]
            staged.kept_cu_seqlens[: size + 1] = self._counting[: size + 1]
            staged.kept_indices[:size] = self._counting[:size]
            self._decoded_rows = rows
        seq_lens = positions + 1
        staged.seq_lens[self._decoded] = seq_lens
        staged.kept_positions[:size] = positions
        self._stage_tokens(self._decoded, positions)
        counts = StepCounts(size, size, size, size)
        return StepLayout(counts, self._decoded, seq_lens, self._counting[:size])

    def _gather_tokens(
        self, rows: np.ndarray, num_computed: np.ndarray, num_scheduled: np.ndarray
    ) -> None:
        staged = self.staged
        staged.rows[: len(rows)] = rows
        staged.seq_lens[rows] = num_computed + num_scheduled
        staged.cu_seqlens[0] = 0
        staged.cu_seqlens[1 : len(rows) + 1] = np.cumsum(num_scheduled)
        self._stage_tokens(np.repeat(rows, num_scheduled), ranges(num_computed, num_scheduled))

    def _stage_tokens(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """rows, positions int64 [T]."""
        staged, size = self.staged, len(rows)
        blocks, offsets = np.divmod(positions, self._block_size)
        staged.token_ids[:size] = self._token_ids[rows, positions]
        staged.positions[:size] = positions
        staged.slot_mapping[:size] = self._block_table[rows, blocks] * self._block_size + offsets

    def _gather_kept(
        self,
        rows: np.ndarray,
        num_computed: np.ndarray,
        num_scheduled: np.ndarray,
        num_sampled: np.ndarray,
        asks: np.ndarray,
    ) -> StepLayout:
        # Of a sequence whose prompt is asked about, all tokens are kept: attention takes the last.
        num_kept = np.where(asks, num_scheduled, num_sampled)
        (kept,) = np.nonzero(num_kept)
        num_kept, size = num_kept[kept], len(kept)
        kept_ends = np.cumsum(num_kept)
        indices = ranges(np.cumsum(num_scheduled)[kept] - num_kept, num_kept)
        seq_lens = num_computed + num_scheduled
        staged = self.staged
        staged.kept_indices[: len(indices)] = indices
        staged.kept_positions[: len(indices)] = ranges(seq_lens[kept] - num_kept, num_kept)
        staged.kept_cu_seqlens[0] = 0
        staged.kept_cu_seqlens[1 : size + 1] = kept_ends
        staged.kept_rows[:size] = rows[kept]
        counts = StepCounts(int(num_scheduled.sum()), len(indices), len(rows), size)
        prompt_targets = None
        if asks.any():
            num_asked = np.where(asks[kept], num_kept, 0)
            first_places = kept_ends - num_kept
            prompt_targets = self._prompt_targets(
                rows[kept], num_computed[kept], num_asked, first_places
            )
        return StepLayout(
            counts=counts,
            sampled_rows=np.repeat(rows, num_sampled),
            sampled_positions=ranges(seq_lens - num_sampled + 1, num_sampled),
            sample_places=ranges(kept_ends - num_sampled[kept], num_sampled[kept]),
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
        token_ids = self._token_ids[of_row, ranges(num_computed + 1, counts)]
        return PromptTargets(
            rows=rows[has_any].tolist(),
            counts=counts[has_any].tolist(),
            num_top=self._num_top_prompt_logprobs[of_row].tolist(),
            kept_places=ranges(first_places, counts),
            token_ids=token_ids.astype(np.int64),
        )
