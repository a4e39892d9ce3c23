"""A step that was queued on a device: its results, once they are on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_svc.compute.device_sampler import PendingLogprobs, PendingTokens
from engine_svc.compute.devices import Mark
from engine_svc.compute.grammar_rows import GrammarRows
from engine_svc.compute.persistent_batch import PersistentBatch, PromptTargets
from engine_svc.planning.step import PromptLogprobs, SampledToken, StepResult
from engine_svc.planning.step_profile import StepProfile


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """`wait` once, in the order of launches: what it finds goes into the rows of the batch.

    `sampled` are the tokens of `rows` at `positions`, both int64 [s]; `grammars` follow them where
    the step has rows of theirs. `scored`, part by part, are those of `prompts`.
    """

    mark: Mark
    batch: PersistentBatch
    profile: StepProfile
    rows: np.ndarray
    positions: np.ndarray
    sampled: PendingTokens | None
    grammars: GrammarRows | None
    prompts: PromptTargets | None
    scored: Sequence[PendingLogprobs]

    def wait(self) -> StepResult:
        self.mark.synchronize()
        self.profile.lap("wait")
        result = StepResult(self._tokens(), self._prompt_logprobs())
        self.profile.lap("list")
        return result

    def _tokens(self) -> tuple[SampledToken, ...]:
        if self.sampled is None:
            return ()
        token_ids, errors, logprobs = self.sampled.listed()
        self.batch.append(self.rows, self.positions, token_ids)
        rows = self.rows.tolist()
        completed = [False] * len(rows)
        if self.grammars is not None:
            completed = self.grammars.accept(rows, token_ids, errors)
        return tuple(
            SampledToken(row, token_id, None if error else entry, error, completes)
            for row, token_id, entry, error, completes in zip(
                rows, token_ids, logprobs, errors, completed, strict=True
            )
        )

    def _prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        if self.prompts is None:
            return ()
        entries = iter([entry for part in self.scored for entry in part.listed()])
        return tuple(
            PromptLogprobs(row, [next(entries) for _ in range(count)])
            for row, count in zip(self.prompts.rows, self.prompts.counts, strict=True)
        )
