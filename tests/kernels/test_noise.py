"""Philox against its published vectors, and the Gumbel noise made of it."""

import math

import pytest
import torch

from kernels.noise import gumbel_noise, gumbel_noise_of, philox4x32

# Known answers of philox4x32-10 as published with Random123 (Salmon et al., 2011).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, -1, 2**32, 2**63 - 1, -(2**63)]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, straight from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (product1 >> 32) ^ c[1] ^ k[0],
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c[3] ^ k[1],
            product0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, expected) -> None:
    words = philox4x32(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([w]) for w in key)
    )
    assert tuple(int(word) for word in words) == expected
    assert tuple(scalar_philox(counter, key)) == expected


def test_noise_is_minus_log_exponential_of_the_documented_bits() -> None:
    vocab_size = 11
    positions = [0, 5, 2**31, 7, 2**32 - 1, 3]
    noise = gumbel_noise(torch.tensor(SEEDS), torch.tensor(positions), vocab_size)
    assert noise.shape == (6, vocab_size)
    for row, (seed, position) in enumerate(zip(SEEDS, positions, strict=True)):
        key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
        for token in range(vocab_size):
            bits = scalar_philox([token // 4, position, 0, 0], key)[token % 4]
            expected = -math.log(-math.log1p(-(bits + 0.5) / 2**32))
            assert float(noise[row, token]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_noise_of_some_tokens_is_that_of_all_tokens_there() -> None:
    seeds, positions = torch.tensor(SEEDS), torch.arange(6)
    ids = torch.randint(0, 1001, (6, 37), generator=torch.Generator().manual_seed(0))
    everything = gumbel_noise(seeds, positions, 1001)
    assert torch.equal(gumbel_noise_of(seeds, positions, ids), everything.gather(1, ids))


def test_noise_of_a_row_does_not_depend_on_the_others() -> None:
    seeds, positions = torch.tensor(SEEDS), torch.arange(6)
    everything = gumbel_noise(seeds, positions, 258)
    for row in range(6):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 258)
        assert torch.equal(alone[0], everything[row])


def test_noise_has_the_mean_and_variance_of_a_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(20) + 1000, 20_000).double()
    # 400,000 draws: the mean is within 5 standard errors of Euler's constant.
    standard_error = math.pi / math.sqrt(6 * noise.numel())
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * standard_error
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
