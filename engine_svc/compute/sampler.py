"""From logits to tokens: the stages of sampling over a whole batch, one after the other.

Masks, biases and bans; penalties; the likeliest token, for greedy rows; temperature; min_p; top_k;
top_p; noise. Log-probabilities are taken before all of these.
A stage runs over the rows that ask for it, and what it does to a row depends on that row alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.sampling_rows import SamplingInputs, WantedLogprobs
from engine_svc.planning.step import SamplingError, TokenLogprobs
from kernels import Kernels

# The log-probability reported for a token that cannot come: JSON has no -inf.
IMPOSSIBLE = -9999.0
# What `Kernels.sample` gives for a row that no token can be chosen for.
_UNUSABLE = -1


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
        # While the same rows go on, their inputs are the same, and their tokens go to the same
        # place.
        self._inputs: SamplingInputs | None = None
        self._token_ids = torch.empty(0, dtype=torch.int64)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> SampledBatch:
        """logits float32 [s, vocab_size], raw; overwritten where options change them.

        The next call with the same inputs overwrites the result's `token_ids`.
        """
        if inputs is not self._inputs:
            self._inputs, self._token_ids = inputs, torch.empty_like(inputs.positions)
        raw = None if inputs.logprobs is None else _raw_rows(logits, inputs)
        self._edit(logits, inputs)
        token_ids = self._kernels.sample(
            logits,
            temperature=inputs.temperature,
            min_p=inputs.min_p,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            seeds=inputs.seeds,
            positions=inputs.positions,
            out=self._token_ids,
        )
        ids = token_ids.tolist()
        errors: list[SamplingError | None] = [None] * len(ids)
        if _UNUSABLE in ids:
            _reject_rows(self._kernels.largest(logits), inputs, token_ids, errors)
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if inputs.logprobs is not None and raw is not None:
            self._list_logprobs(raw, token_ids, inputs.logprobs, logprobs)
        return SampledBatch(token_ids, logprobs, errors)

    def score(
        self, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Of given tokens [n] under raw logits, float32 [n, vocab_size], with num_top[i] likeliest
        ones each."""
        return list_logprobs(
            num_top, *self._kernels.token_logprobs(logits, token_ids, max(num_top))
        )

    def _edit(self, logits: Tensor, inputs: SamplingInputs) -> None:
        """All that comes before the temperature: masks, biases and bans, penalties; in place."""
        for mask in inputs.masks:
            self._kernels.mask_logits(logits, mask.rows, mask.allowed)
        if inputs.biases is not None:
            self._kernels.bias_logits(logits, *inputs.biases)
        if inputs.penalties is not None:
            self._kernels.penalize(logits, *inputs.penalties)

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


def list_logprobs(
    num_top: Sequence[int], logprobs: Tensor, top_ids: Tensor, top: Tensor
) -> list[TokenLogprobs]:
    """What `Kernels.token_logprobs` gives, on the host, as it is reported; num_top [n]."""
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


def _raw_rows(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """The rows that ask for log-probabilities, as they are before any option changes them."""
    assert inputs.logprobs is not None
    rows = inputs.logprobs.rows
    first, last = int(rows[0]), int(rows[-1])
    is_edited = bool(inputs.masks) or inputs.biases is not None or inputs.penalties is not None
    if not is_edited and last - first + 1 == len(rows):
        return logits[first : last + 1]
    return logits.index_select(0, rows)


def _finite(logprobs: Tensor) -> np.ndarray:
    # NaN comes from a prompt's logits, or beside an error; such a sequence ends with that.
    return np.minimum(np.fmax(logprobs.numpy(), np.float32(IMPOSSIBLE)), np.float32(0.0))


def _reject_rows(
    largest: Tensor, inputs: SamplingInputs, token_ids: Tensor, errors: list[SamplingError | None]
) -> None:
    """Sets the errors of rows that no token could be chosen for; such rows get token 0.

    largest [s]: of each row's logits.
    """
    edits = [mask.rows for mask in inputs.masks]
    if inputs.biases is not None:
        edits.append(inputs.biases.rows)
    edited = {row for rows in edits for row in rows.tolist()}
    for row, token_id in enumerate(token_ids.tolist()):
        if token_id == _UNUSABLE:
            is_empty = float(largest[row]) == -math.inf
            errors[row] = (
                SamplingError.NO_TOKEN_LEFT
                if is_empty and row in edited
                else SamplingError.BAD_LOGITS
            )
            token_ids[row] = 0
