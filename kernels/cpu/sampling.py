"""The sampler's ops on torch's CPU build: penalties, the filters, Gumbel-max, log-probabilities.

Whatever a row asks for, its result must not change with its neighbours: sums over a row go through
softmax or cumsum, which take each row by itself, never through torch.sum, which splits a lone row
over the threads.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.noise import gumbel_noise, gumbel_noise_of
from kernels.ops import GREEDY_TEMPERATURE

# How many of the likeliest tokens are looked at first where only top_p bounds the choice, and how
# many times more when those were not enough.
_FIRST_CANDIDATES = 1024
_MORE_CANDIDATES = 8
# For each byte of a mask what it adds to the logits of its eight tokens: 0, or -inf.
_OFFSETS_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0.0),
    np.float32(-np.inf),
)


def mask_logits(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """See `Kernels.mask_logits`."""
    # Eight tokens at a time, and added: masked_fill takes 15 times as long on a mixed mask.
    offsets = np.take(_OFFSETS_OF_BYTE, allowed.numpy().view(np.uint8), axis=0)
    offsets = offsets.reshape(len(offsets), -1)[:, : logits.shape[1]]
    logits.index_add_(0, rows, torch.from_numpy(offsets))


def bias_logits(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
    """See `Kernels.bias_logits`."""
    logits.index_put_((rows, token_ids), biases, accumulate=True)


def penalize(
    logits: Tensor,
    rows: Tensor,
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
    penalized = logits.index_select(0, rows)
    seen = torch.zeros_like(penalized).scatter_add_(1, ids, in_sequence.float()) > 0
    output_counts = torch.zeros_like(penalized).scatter_add_(1, ids, in_output.float())
    repetition = repetition[:, None]
    repeated = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
    penalized = torch.where(seen, repeated, penalized)
    loss = (output_counts > 0) * presence[:, None] + output_counts * frequency[:, None]
    logits.index_copy_(0, rows, penalized.sub_(loss))


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
    largest, chosen = torch.max(logits, dim=-1)
    # The maximum of a row with a NaN is NaN.
    is_usable = torch.isfinite(largest)
    # Beyond float32 no noise outweighs a difference: the likeliest token is drawn.
    is_random = (temperature >= GREEDY_TEMPERATURE) & (top_p > 0)
    is_random &= torch.isfinite(largest / temperature)
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
    return chosen.masked_fill_(~is_usable, -1)


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
    probabilities = torch.softmax(scaled, dim=-1)
    chosen = torch.empty_like(seeds)
    rows = torch.arange(len(scaled))
    first_ranked = torch.full_like(num_kept, min(_FIRST_CANDIDATES, vocab_size))
    num_ranked = int(torch.where(num_kept < vocab_size, num_kept, first_ranked).max())
    while len(rows):
        is_cut = num_kept[rows] < vocab_size
        ids = _likeliest(scaled[rows], num_ranked)
        kept = _is_kept(probabilities[rows].gather(1, ids), num_kept[rows], is_cut, top_p[rows])
        noise = _noise_at(ids, seeds[rows], positions[rows], vocab_size)
        scores = scaled[rows].gather(1, ids) + noise
        best = torch.argmax(scores.masked_fill_(~kept, -torch.inf), dim=-1)
        chosen[rows] = ids.gather(1, best[:, None])[:, 0]
        if num_ranked == vocab_size:
            break
        # top_p may keep more tokens than were ranked, where nothing else limits their number.
        rows = rows[~is_cut & kept[:, -1]]
        num_ranked = min(_MORE_CANDIDATES * num_ranked, vocab_size)
    return chosen


def _is_kept(probabilities: Tensor, num_kept: Tensor, is_cut: Tensor, top_p: Tensor) -> Tensor:
    """Which of the ranked tokens, with these probabilities [n, ranked], min_p, top_k, top_p keep.

    num_kept [n] are left by min_p and top_k; is_cut [n] where that is less than all.
    """
    probabilities = probabilities.double()
    mass = probabilities.cumsum(dim=-1)
    num_ranked = probabilities.shape[1]
    last = (num_kept.clamp(max=num_ranked) - 1)[:, None]
    total = torch.where(is_cut[:, None], mass.gather(1, last), 1.0)
    wanted = torch.where(top_p < 1, top_p.double(), torch.inf)[:, None] * total
    return (torch.arange(num_ranked) < num_kept[:, None]) & (mass - probabilities < wanted)


def _noise_at(ids: Tensor, seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    # Noise is made for four ids at a time: for many ids it is cheaper to make it for all.
    if 4 * ids.shape[1] > vocab_size:
        return gumbel_noise(seeds, positions, vocab_size).gather(1, ids)
    return gumbel_noise_of(seeds, positions, ids)


def _min_p_bound(scaled: Tensor, min_p: Tensor) -> Tensor:
    """The least scaled logit whose probability is min_p times the largest: max + log(min_p)."""
    return (scaled.amax(dim=-1) + torch.log(min_p))[:, None]


def _likeliest(values: Tensor, k: int) -> Tensor:
    """Ids [n, k] of the largest of `values` [n, V], float32, in order, equal ones by id.

    Ranks the pairs (value, -id) as one integer: a float's bits order as a signed integer does once
    those of a negative number are turned round, and adding 0 makes -0 the same as 0.
    """
    bits = (values + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys = ordered - torch.arange(values.shape[1])
    return -torch.topk(keys, k, dim=-1).values & 0xFFFFFFFF
