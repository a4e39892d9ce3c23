"""The noise on the GPU: the bits of kernels/noise.py, the same float32 of each, and its bound."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu.philox import bits_from, bits_of, gumbel, noise_bound
from kernels.noise import gumbel_noise, gumbel_noise_of

_SIZE = 2**15


@triton.jit
def _noise_kernel(bits, noise, bounds, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    words = tl.load(bits + places).to(tl.uint32, bitcast=True)
    tl.store(noise + places, gumbel(words))
    tl.store(bounds + places, noise_bound(words))


@triton.jit
def _bits_kernel(noise, noise_in_any_order, seed, position, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    seed, position = tl.load(seed), tl.load(position)
    tl.store(noise + places, gumbel(bits_from(16, seed, position, SIZE)))
    token_ids = 16 + ((places * 37) % SIZE)
    tl.store(noise_in_any_order + places, gumbel(bits_of(token_ids, seed, position)))


def test_the_noise_of_any_bits_is_that_of_the_cpu_to_the_last_bit(device) -> None:
    words = torch.randint(0, 2**32, (8 * _SIZE,), generator=torch.Generator().manual_seed(0))
    words[:_SIZE] = torch.arange(_SIZE)
    words[_SIZE : 2 * _SIZE] = 2**32 - 1 - torch.arange(_SIZE)
    # As kernels/noise.py has it.
    uniform = (words.double() + 0.5) * 2.0**-32
    expected = (-(-(-uniform).log1p()).log()).float()
    bits = torch.where(words < 2**31, words, words - 2**32).int().to(device)
    noise, bounds = torch.empty(2, len(words), device=device)
    _noise_kernel[(8,)](bits, noise, bounds, SIZE=_SIZE)
    assert torch.equal(noise.cpu(), expected)
    excess = bounds.cpu() - expected
    assert float(excess.min()) >= -1e-5
    # Where noise is large enough to make a token win, the bound is tight.
    assert float(excess[(expected > 3) & (words >= 2**13)].max()) < 0.1


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 12345678901234])
@pytest.mark.parametrize("position", [0, 77, 2**31, 2**32 - 1])
def test_the_bits_are_those_of_seed_position_and_token(device, seed, position) -> None:
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    noise, in_any_order = torch.empty(2, 64, device=device)
    _bits_kernel[(1,)](noise, in_any_order, seeds.to(device), positions.to(device), SIZE=64)
    assert torch.equal(noise.cpu(), gumbel_noise(seeds, positions, 80)[0, 16:])
    token_ids = 16 + torch.arange(64) * 37 % 64
    assert torch.equal(in_any_order.cpu(), gumbel_noise_of(seeds, positions, token_ids[None])[0])
