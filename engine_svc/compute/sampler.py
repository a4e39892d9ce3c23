"""From logits to tokens: DESIGN's sampling order over a whole batch, one stage after the other.

A stage runs over the rows that ask for it, and what it does to a row depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_svc.compute.step_tensors import SamplingInputs
from engine_svc.planning.step import SamplingError, TokenLogprobs
from kernels import Kernels

# The log-probability reported for a token that cannot come: JSON has no -inf.
IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """What came of `s` rows; a row with an error has no token worth using."""

    token_ids: Tensor  # int64 [s]
    logprobs: Sequence[TokenLogprobs | None]
    errors: Sequence[SamplingError | None]


class Sampler:
    """Chooses a token for each row of a batch."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(self, logits: Tensor, rows: SamplingInputs) -> SampledBatch:
        """logits float32 [s, vocab_size], of which rows that hold a NaN are overwritten."""
        errors = _reject_rows(logits)
        adjusted = self._penalize(logits, rows)
        token_ids = self._kernels.sample(
            adjusted,
            temperature=rows.temperature,
            min_p=rows.min_p,
            top_k=rows.top_k,
            top_p=rows.top_p,
            seeds=rows.seeds,
            positions=rows.seq_lens,
        )
        return SampledBatch(token_ids, self._logprobs(logits, token_ids, rows), errors)

    def _penalize(self, logits: Tensor, rows: SamplingInputs) -> Tensor:
        """New logits if any row is penalised: the given ones stay raw for the log-probabilities."""
        (chosen,) = torch.nonzero(rows.has_penalties, as_tuple=True)
        if not len(chosen):
            return logits
        penalised = logits[chosen]
        self._kernels.penalize(
            penalised,
            token_ids=rows.token_ids[chosen],
            prompt_lens=rows.prompt_lens[chosen],
            seq_lens=rows.seq_lens[chosen],
            repetition=rows.repetition_penalty[chosen],
            presence=rows.presence_penalty[chosen],
            frequency=rows.frequency_penalty[chosen],
        )
        return logits.index_copy(0, chosen, penalised)

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, rows: SamplingInputs
    ) -> Sequence[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(logits)
        (asking,) = torch.nonzero(rows.wants_logprobs, as_tuple=True)
        if not len(asking):
            return result
        num_top = rows.num_top_logprobs[asking]
        chosen, top_ids, top = self._kernels.token_logprobs(
            logits[asking], token_ids[asking], int(num_top.max())
        )
        values = zip(
            asking.tolist(),
            num_top.tolist(),
            chosen.clamp(IMPOSSIBLE, 0.0).tolist(),
            top_ids.tolist(),
            top.clamp(IMPOSSIBLE, 0.0).tolist(),
            strict=True,
        )
        for row, k, logprob, ids, logprobs in values:
            result[row] = TokenLogprobs(logprob, tuple(ids[:k]), tuple(logprobs[:k]))
        return result


def _reject_rows(logits: Tensor) -> list[SamplingError | None]:
    """An error for each row without a finite largest logit; such rows become zeros, in place."""
    # The maximum of a row with a NaN is NaN, so one pass finds every case.
    is_bad = ~torch.isfinite(logits.amax(dim=-1))
    if torch.any(is_bad):
        logits[is_bad] = 0.0
    return [SamplingError.BAD_LOGITS if bad else None for bad in is_bad.tolist()]
