"""The sampler's noise: Philox4x32-10 bits and the Gumbel numbers made of them, on any torch device.

Every backend draws these same bits, so that a token depends on (seed, position, token id) alone.
"""

import torch
from torch import Tensor

# Multipliers and Weyl key increments of Philox4x32 (Salmon et al., "Parallel random numbers: as
# easy as 1, 2, 3", SC 2011).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_UNIT = 2.0**-32


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words for each counter and key.

    Words are int64 tensors with values in [0, 2^32), of shapes that broadcast together: torch has
    no full set of uint32 ops, and an int64 product keeps all 64 bits of two such words.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (product0 >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = product1.bitwise_and_(_MASK), product0.bitwise_and_(_MASK)
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(
    seeds: Tensor, positions: Tensor, vocab_size: int, first_token_id: int = 0
) -> Tensor:
    """Standard Gumbel noise of every token id, float32 [n, vocab_size].

    Of the ids from first_token_id on, a multiple of 4, where that is given.

    The bits of token t at `position` are word t mod 4 of Philox with counter
    (t div 4, position, 0, 0) and key (low, high half of the seed). v = (bits + 1/2) / 2^32 is
    uniform on (0, 1), -log(1 - v) exponential, and minus the log of that Gumbel. seeds int64 [n],
    any value; positions int64 [n] in [0, 2^32).
    """
    first_group = first_token_id // 4
    num_groups = (vocab_size + 3) // 4
    groups = torch.arange(first_group, first_group + num_groups, device=seeds.device)
    words = _words(groups[None], seeds, positions)
    noise = torch.stack([_gumbel(word) for word in words], dim=-1)
    return noise.flatten(1)[:, :vocab_size]


def gumbel_noise_of(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The values of `gumbel_noise` at token_ids [n, k] only -> float32 [n, k]."""
    words = _words(token_ids >> 2, seeds, positions)
    return _gumbel(torch.stack(words, dim=-1).gather(-1, (token_ids & 3)[..., None])[..., 0])


def _words(
    groups: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seeds = seeds[:, None]
    zero = torch.zeros_like(seeds)
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    return philox4x32((groups, positions[:, None], zero, zero), key)


def _gumbel(bits: Tensor) -> Tensor:
    # In float64, since float32 would round the v next to 1 up to 1 and make the noise infinite.
    uniform = bits.double().add_(0.5).mul_(_UNIT)
    return uniform.neg_().log1p_().neg_().log_().neg_().float()
