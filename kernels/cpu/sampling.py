"""The sampler's ops on torch's CPU build: penalties, the filters, Gumbel-max, log-probabilities.

Whatever a row asks for, its result must not change with its neighbours: sums over a row go through
softmax or cumsum, which take each row by itself, never through torch.sum, which splits a lone row
over the threads.
"""

import torch
from torch import Tensor

from kernels.noise import gumbel_noise, gumbel_noise_of

GREEDY_TEMPERATURE = 1e-5
# The likeliest tokens looked at first where only top_p bounds the choice.
_FIRST_CANDIDATES = 1024


def penalize(
    logits: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    seq_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See `Kernels.penalize`."""
    places = torch.arange(token_ids.shape[1])
    in_sequence = places < seq_lens[:, None]
    in_output = in_sequence & (places >= prompt_lens[:, None])
    ids = torch.where(in_sequence, token_ids, 0).long()
    seen = torch.zeros_like(logits).scatter_add_(1, ids, in_sequence.float()) > 0
    output_counts = torch.zeros_like(logits).scatter_add_(1, ids, in_output.float())
    repetition = repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, repeated, logits))
    loss = (output_counts > 0) * presence[:, None] + output_counts * frequency[:, None]
    logits.sub_(loss)


def sample(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """See `Kernels.sample`."""
    chosen = torch.argmax(logits, dim=-1)
    is_random = (temperature >= GREEDY_TEMPERATURE) & (top_p > 0)
    is_filtered = ((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1)
    for rows, draw in (
        (torch.nonzero(is_random & ~is_filtered)[:, 0], _draw_from_all),
        (torch.nonzero(is_random & is_filtered)[:, 0], _draw_from_likeliest),
    ):
        if len(rows):
            scaled = logits[rows] / temperature[rows, None]
            chosen[rows] = draw(
                scaled, min_p[rows], top_k[rows], top_p[rows], seeds[rows], positions[rows]
            )
    return chosen


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `Kernels.token_logprobs`."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen_logprobs = logprobs.gather(1, chosen[:, None])[:, 0]
    top_ids = _likeliest(logprobs, num_top)
    return chosen_logprobs, top_ids, logprobs.gather(1, top_ids)


def _draw_from_all(
    scaled: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    scores = gumbel_noise(seeds, positions, scaled.shape[1]).add_(scaled)
    if torch.any(min_p > 0):
        scores.masked_fill_(scaled < _min_p_bound(scaled, min_p), -torch.inf)
    return torch.argmax(scores, dim=-1)


def _draw_from_likeliest(
    scaled: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Each filter keeps a beginning of the ranked tokens, so only a beginning is ranked at all."""
    vocab_size = scaled.shape[1]
    num_kept = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size)
    if torch.any(min_p > 0):
        above = (scaled >= _min_p_bound(scaled, min_p)).sum(dim=-1)
        num_kept = torch.minimum(num_kept, above)
    is_cut = num_kept < vocab_size
    probabilities = torch.softmax(scaled, dim=-1)
    num_ranked = int(torch.where(is_cut, num_kept, min(_FIRST_CANDIDATES, vocab_size)).max())
    while True:
        ids = _likeliest(scaled, num_ranked)
        candidates = probabilities.gather(1, ids).double()
        mass = candidates.cumsum(dim=-1)
        # All tokens of a row that nothing cut before top_p have a mass of 1, however few of them
        # are ranked here.
        last = (num_kept.clamp(max=num_ranked) - 1)[:, None]
        total = torch.where(is_cut[:, None], mass.gather(1, last), 1.0)
        wanted = torch.where(top_p < 1, top_p.double(), torch.inf)[:, None] * total
        if num_ranked == vocab_size or not torch.any(~is_cut & (mass[:, -1:] < wanted)[:, 0]):
            break
        num_ranked = vocab_size
    ranks = torch.arange(num_ranked)
    kept = (ranks < num_kept[:, None]) & (mass - candidates < wanted)
    scores = scaled.gather(1, ids) + gumbel_noise_of(seeds, positions, ids)
    best = torch.argmax(scores.masked_fill_(~kept, -torch.inf), dim=-1)
    return ids.gather(1, best[:, None])[:, 0]


def _min_p_bound(scaled: Tensor, min_p: Tensor) -> Tensor:
    """The least scaled logit whose probability is min_p times the largest: max + log(min_p)."""
    return (scaled.amax(dim=-1) + torch.log(min_p))[:, None]


def _likeliest(values: Tensor, k: int) -> Tensor:
    """Ids [n, k] of the largest of `values` [n, V], float32, in order, equal ones by id.

    Ranks the pairs (value, -id) as one integer: a float's bits order as a signed integer does once
    those of a negative number are turned round.
    """
    bits = values.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys = ordered - torch.arange(values.shape[1])
    return -torch.topk(keys, k, dim=-1).values & 0xFFFFFFFF
