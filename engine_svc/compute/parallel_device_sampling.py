"""Sampling over ranks whose logits are on devices: what the host may not wait for, it says before.

Greedy rows and those that draw from all tokens take one reading of a rank's logits, and two numbers
that ranks tell each other. Rows with filters, which the host knows, are drawn apart from them.
"""

from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.model.sharded_source import VocabShard
from engine_svc.compute.parallel_filters import Filters
from engine_svc.compute.parallel_keys import ids_of, ranking_keys, values_of
from engine_svc.compute.parallel_sampling import ParallelSampling
from engine_svc.compute.ranks import Ranks
from engine_svc.compute.sampling_rows import SamplingInputs
from kernels import GREEDY_TEMPERATURE, Kernels

_UNUSABLE: Final = -1
# Filters take some ten numbers of 64 bits for each token.
_ROWS_AT_ONCE: Final = 64


class PartSampling(Protocol):
    """What kernels of a device have beside their ops."""

    def draw_from_part(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        first_token_id: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the tokens from first_token_id on, of logits [n, V / ranks], have for `sample`.

        All [n]: the largest logit, not finite where it or any other is not, and the first token
        that has it; for rows that draw from all tokens, the best score and its token.
        """


class DeviceParallelSampling(ParallelSampling):
    """As `ParallelSampling`. `sample` gives rows with filters a token that `draw_filtered`, which
    has to be called then, replaces."""

    def __init__(self, kernels: Kernels, ranks: Ranks, shard: VocabShard) -> None:
        super().__init__(kernels, ranks, shard)
        self._part: PartSampling = kernels

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> Tensor:
        largest, likeliest, scores, winners = self._part.draw_from_part(
            *(logits, temperature, min_p, top_k, top_p, seeds, positions, self._shard.first)
        )
        keys = self._ranks.max_over_ranks(ranking_keys(largest, likeliest))
        best = self._ranks.gather(torch.stack([scores.double(), winners.double()]))
        # Of equal scores the first one's: lower ranks have lower ids.
        of_rank = best[:, 0].argmax(dim=0, keepdim=True)
        drawn = best[:, 1].gather(0, of_rank)[0].long()
        is_plain = (temperature >= GREEDY_TEMPERATURE) & (top_p >= 1)
        is_plain &= (top_k == 0) & (min_p == 0)
        out.copy_(torch.where(is_plain, drawn, ids_of(keys)))
        return out.masked_fill_(~torch.isfinite(values_of(keys)), _UNUSABLE)

    def draw_filtered(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        """The tokens of `rows`, int64 [m], of which `filtered_rows` tells, into those of out [n].

        The others as in `Kernels.sample`, for all n rows.
        """
        for some in rows.split(_ROWS_AT_ONCE):
            own = logits.index_select(0, some)
            likeliest = self._likeliest(own)
            largest, warmth = values_of(likeliest), temperature[some]
            filters = Filters(min_p[some], top_k[some], top_p[some])
            drawn = self._draw(
                own / warmth[:, None], largest / warmth, filters, seeds[some], positions[some]
            )
            # As in ParallelSampling.
            drawn = torch.where(torch.isfinite(largest / warmth), drawn, ids_of(likeliest))
            out.index_copy_(0, some, drawn.masked_fill_(~torch.isfinite(largest), _UNUSABLE))


def filtered_rows(inputs: SamplingInputs) -> np.ndarray:
    """Which rows of a step draw from what filters leave, int64 [m]; `inputs` of the host."""
    is_random = (inputs.temperature >= GREEDY_TEMPERATURE) & (inputs.top_p > 0)
    is_filtered = (inputs.min_p > 0) | (inputs.top_k > 0) | (inputs.top_p < 1)
    return np.flatnonzero((is_random & is_filtered).numpy())
