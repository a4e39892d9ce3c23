"""Sampling from logits that are parted among ranks by tokens: no rank has those of another.

The sampling ops of `Kernels`, on a rank's logits [n, V / ranks] and everybody's token ids. What
ranks tell each other is as long as a batch has rows, but for the search of the filters' bounds.
All ranks get the same results, and those do not depend on how many ranks there are. `sample` is for
tensors on the CPU: see parallel_device_sampling.py.
"""

from typing import Final

import torch
from torch import Tensor

from engine_svc.compute.model.sharded_source import VocabShard
from engine_svc.compute.parallel_filters import Filters, kept_tokens
from engine_svc.compute.parallel_keys import Masses, ids_of, ranking_keys, values_of
from engine_svc.compute.ranks import Ranks
from kernels import GREEDY_TEMPERATURE, Kernels
from kernels.noise import gumbel_noise

_BITS_PER_WORD: Final = 32
_UNUSABLE: Final = -1
# Below every key.
_NO_KEY: Final = -(1 << 63)


class ParallelSampling:
    """A rank's tokens are those of `shard`; `kernels` edit logits of its own."""

    def __init__(self, kernels: Kernels, ranks: Ranks, shard: VocabShard) -> None:
        self._kernels = kernels
        self._ranks = ranks
        self._shard = shard
        self._masses = Masses(shard.whole_size)

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        """As of `Kernels`, `allowed` for the whole vocabulary."""
        first = self._shard.first // _BITS_PER_WORD
        end = -(-(self._shard.first + self._shard.size) // _BITS_PER_WORD)
        self._kernels.mask_logits(logits, rows, allowed[:, first:end].contiguous())

    def bias_logits(self, logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
        """As of `Kernels`. Biases on others' tokens become 0, on any token."""
        places, is_own = self._places(token_ids)
        biases = biases.masked_fill(~is_own, 0.0)
        logits.index_put_((rows, places.masked_fill_(~is_own, 0)), biases, accumulate=True)

    def penalize(
        self,
        logits: Tensor,
        rows: Tensor,
        token_ids: Tensor,
        prompt_lens: Tensor,
        seq_lens: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """As of `Kernels`. Others' tokens are counted at a place beyond this rank's."""
        positions = torch.arange(token_ids.shape[1], device=logits.device)
        places, is_own = self._places(token_ids.long())
        in_sequence = (positions < seq_lens[:, None]) & is_own
        in_output = in_sequence & (positions >= prompt_lens[:, None])
        places.masked_fill_(~in_sequence, logits.shape[1])
        penalized = logits.index_select(0, rows)
        counts = torch.zeros(2, len(rows), logits.shape[1] + 1, device=logits.device)
        counts[0].scatter_add_(1, places, in_sequence.float())
        counts[1].scatter_add_(1, places, in_output.float())
        seen, output_counts = counts[0, :, :-1] > 0, counts[1, :, :-1]
        factors = repetition[:, None]
        repeated = torch.where(penalized > 0, penalized / factors, penalized * factors)
        penalized = torch.where(seen, repeated, penalized)
        loss = (output_counts > 0) * presence[:, None] + output_counts * frequency[:, None]
        logits.index_copy_(0, rows, penalized.sub_(loss))

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """As of `Kernels`; ids of the whole vocabulary."""
        likeliest = self._likeliest(logits)
        largest, chosen = values_of(likeliest), ids_of(likeliest)
        is_usable = torch.isfinite(largest)
        # Beyond float32 no noise outweighs a difference: the likeliest token is drawn.
        is_random = (temperature >= GREEDY_TEMPERATURE) & (top_p > 0)
        is_random &= torch.isfinite(largest / temperature)
        if bool(is_random.any()):
            rows = torch.nonzero(is_random)[:, 0]
            scaled = logits[rows] / temperature[rows, None]
            filters = Filters(min_p[rows], top_k[rows], top_p[rows])
            drawn = self._draw(
                scaled, largest[rows] / temperature[rows], filters, seeds[rows], positions[rows]
            )
            chosen[rows] = drawn
        chosen.masked_fill_(~is_usable, _UNUSABLE)
        return chosen if out is None else out.copy_(chosen)

    def token_logprobs(
        self, logits: Tensor, chosen: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As of `Kernels`, `chosen` of the whole vocabulary."""
        largest = values_of(self._likeliest(logits))
        mass = self._ranks.sum_over_ranks(self._masses.of(logits, largest).sum(dim=-1))
        log_total = largest.double() + self._masses.log(mass)
        places, is_own = self._places(chosen)
        found = logits.gather(1, places.masked_fill_(~is_own, 0)[:, None])[:, 0]
        found = self._ranks.sum_over_ranks(found.masked_fill_(~is_own, 0.0))
        top = self._top(logits, num_top)
        return (
            (found.double() - log_total).float(),
            ids_of(top),
            (values_of(top).double() - log_total[:, None]).float(),
        )

    def largest(self, logits: Tensor) -> Tensor:
        """As of `Kernels`."""
        return values_of(self._likeliest(logits))

    def _places(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where this rank has tokens, and whether it has them."""
        places = token_ids - self._shard.first
        return places, (places >= 0) & (places < self._shard.size)

    def _likeliest(self, scores: Tensor) -> Tensor:
        """The largest key of each row, of scores [n, V / ranks], over all ranks [n]."""
        # The maximum of a row with a NaN is NaN, whose key is above all others.
        values, places = scores.max(dim=-1)
        return self._ranks.max_over_ranks(ranking_keys(values, places + self._shard.first))

    def _top(self, logits: Tensor, num_top: int) -> Tensor:
        """The keys of the num_top likeliest tokens of all ranks [n, num_top], in order."""
        keys = logits.new_full((len(logits), num_top), _NO_KEY, dtype=torch.int64)
        if not num_top:
            return keys
        ids = torch.arange(logits.shape[1], device=logits.device) + self._shard.first
        num_own = min(num_top, logits.shape[1])
        keys[:, :num_own] = ranking_keys(logits, ids).topk(num_own, dim=-1).values
        gathered = self._ranks.gather(keys).transpose(0, 1).flatten(1)
        return gathered.topk(num_top, dim=-1).values

    def _draw(
        self,
        scaled: Tensor,
        highest: Tensor,
        filters: Filters,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Gumbel-max over what the filters keep -> ids [n].

        scaled [n, V / ranks]: logits over temperatures; highest [n] of all ranks.
        """
        noise = gumbel_noise(seeds, positions, self._shard.size, self._shard.first)
        scores = noise.add_(scaled)
        kept = kept_tokens(scaled, highest, filters, self._masses, self._ranks)
        if kept is not None:
            scores.masked_fill_(~kept, -torch.inf)
        return ids_of(self._likeliest(scores))
