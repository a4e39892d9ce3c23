"""From logits to tokens: the stages of sampling over a whole batch, one after the other.

Masks, biases and bans; penalties; the likeliest token, for greedy rows; temperature; min_p; top_k;
top_p; noise. Log-probabilities are taken before all of these.
A stage runs over the rows that ask for it, and what it does to a row depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_svc.compute.sampling_rows import SamplingInputs, WantedLogprobs
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

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> SampledBatch:
        """logits float32 [s, vocab_size], raw; overwritten."""
        errors = _reject_rows(logits)
        # A copy of the rows that ask, since what follows changes the logits in place.
        raw = None if inputs.logprobs is None else logits.index_select(0, inputs.logprobs.rows)
        self._edit(logits, inputs, errors)
        token_ids = self._kernels.sample(
            logits,
            temperature=inputs.temperature,
            min_p=inputs.min_p,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            seeds=inputs.seeds,
            positions=inputs.positions,
        )
        logprobs: list[TokenLogprobs | None] = [None] * len(logits)
        if inputs.logprobs is not None and raw is not None:
            self._list_logprobs(raw, token_ids, inputs.logprobs, logprobs)
        return SampledBatch(token_ids, logprobs, errors)

    def score(
        self, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Of given tokens [n] under raw logits, float32 [n, vocab_size], with num_top[i] likeliest
        ones each."""
        logprobs, top_ids, top = self._kernels.token_logprobs(logits, token_ids, max(num_top))
        values = zip(
            num_top,
            _finite(logprobs).tolist(),
            top_ids.tolist(),
            _finite(top).tolist(),
            strict=True,
        )
        return [
            TokenLogprobs(logprob, tuple(ids[:k]), tuple(likeliest[:k]))
            for k, logprob, ids, likeliest in values
        ]

    def _edit(
        self, logits: Tensor, inputs: SamplingInputs, errors: list[SamplingError | None]
    ) -> None:
        """All that comes before the temperature: masks, biases and bans, penalties; in place."""
        kernels = self._kernels
        edited = []
        for mask in inputs.masks:
            kernels.mask_logits(logits, mask.rows, mask.allowed)
            edited.append(mask.rows)
        if inputs.biases is not None:
            kernels.bias_logits(logits, *inputs.biases)
            edited.append(inputs.biases.rows)
        if inputs.penalties is not None:
            rows, *arguments = inputs.penalties
            penalised = logits.index_select(0, rows)
            kernels.penalize(penalised, *arguments)
            logits.index_copy_(0, rows, penalised)
            edited.append(rows)
        if edited:
            _reject_edited(logits, torch.unique(torch.cat(edited)), errors)

    def _list_logprobs(
        self,
        raw: Tensor,
        token_ids: Tensor,
        wanted: WantedLogprobs,
        result: list[TokenLogprobs | None],
    ) -> None:
        chosen = token_ids[wanted.rows]
        entries = self.score(raw, chosen, wanted.num_top)
        for row, entry in zip(wanted.rows.tolist(), entries, strict=True):
            result[row] = entry


def _finite(logprobs: Tensor) -> Tensor:
    # NaN comes from a prompt's logits only; such a sequence ends with an error at its first token.
    return torch.nan_to_num(logprobs, nan=IMPOSSIBLE).clamp(IMPOSSIBLE, 0.0)


def _reject_rows(logits: Tensor) -> list[SamplingError | None]:
    """An error for each row without a finite largest logit; such rows become zeros, in place."""
    # The maximum of a row with a NaN is NaN, so one pass finds every case.
    is_bad = ~torch.isfinite(logits.amax(dim=-1))
    if not torch.any(is_bad):
        return [None] * len(logits)
    logits[is_bad] = 0.0
    return [SamplingError.BAD_LOGITS if bad else None for bad in is_bad.tolist()]


def _reject_edited(logits: Tensor, rows: Tensor, errors: list[SamplingError | None]) -> None:
    """Like `_reject_rows`, for `rows` whose logits were finite until they were edited."""
    best = logits.amax(dim=-1)[rows]
    is_bad = ~torch.isfinite(best)
    if not torch.any(is_bad):
        return
    logits[rows[is_bad]] = 0.0
    for row, value in zip(rows[is_bad].tolist(), best[is_bad].tolist(), strict=True):
        is_empty = value == -torch.inf
        reason = SamplingError.NO_TOKEN_LEFT if is_empty else SamplingError.BAD_LOGITS
        errors[row] = errors[row] or reason
