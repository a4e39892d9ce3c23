"""The sampler's ops: distributions, seeds, independence of rows, penalties, log-probabilities."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import Kernels
from kernels.cpu.backend import CpuKernels
from kernels.cpu.library import runnable
from kernels.reference import ReferenceKernels
from tests.fakes.huge_logits import FILTERS as HUGE_FILTERS
from tests.fakes.huge_logits import huge_logits
from tests.fakes.native_ops import open_sampling

VOCAB_SIZE = 64
# temperature, min_p, top_k, top_p
FILTERS = {
    "temperature": (0.7, 0.0, 0, 1.0),
    "min_p": (1.0, 0.05, 0, 1.0),
    "top_k": (1.0, 0.0, 5, 1.0),
    "top_p": (1.0, 0.0, 0, 0.8),
    "top_k over the whole vocabulary": (1.3, 0.0, 1000, 1.0),
    "top_k then top_p": (1.5, 0.0, 8, 0.6),
    "min_p then top_p": (1.5, 0.1, 0, 0.7),
    "all": (2.0, 0.05, 10, 0.9),
    "the hottest that is taken": (1e30, 0.5, 0, 0.9),
    "greedy": (0.0, 0.0, 0, 1.0),
    "just above greedy": (2e-5, 0.0, 0, 1.0),
    "top_p 0": (1.0, 0.0, 0, 0.0),
    "top_k 1": (1.0, 0.0, 1, 1.0),
}


@pytest.fixture(params=["torch", *runnable()])
def kernels(request: pytest.FixtureRequest) -> Iterator[object]:
    """The sampler's methods of each implementation."""
    if request.param == "torch":
        yield CpuKernels()
        return
    with open_sampling(request.param, num_threads=2) as sampling:
        yield sampling


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * 2


def sample(kernels: Kernels, logits: Tensor, filters, seeds: Tensor, positions: Tensor) -> Tensor:
    """filters: one tuple for all rows, or one per row."""
    if isinstance(filters, tuple):
        filters = [filters] * len(logits)
    temperature, min_p, top_k, top_p = zip(*filters, strict=True)
    return kernels.sample(
        logits,
        temperature=torch.tensor(temperature),
        min_p=torch.tensor(min_p),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        seeds=seeds,
        positions=positions,
    )


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_tokens_come_as_often_as_the_exact_distribution_says(kernels, filters) -> None:
    num_draws = 20_000
    logits = random_logits(1)
    exact = ReferenceKernels().probabilities(logits[0], *filters)
    drawn = sample(
        kernels,
        logits.expand(num_draws, -1),
        filters,
        seeds=torch.full((num_draws,), 1234),
        positions=torch.arange(num_draws),
    )
    counts = torch.bincount(drawn, minlength=VOCAB_SIZE).double()
    assert not counts[exact == 0].any(), "a token that the filters exclude was drawn"
    expected = exact * num_draws
    is_common = expected >= 5
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    degrees = int(is_common.sum()) - (0 if float(expected[-1]) > 0 else 1)
    # Chi-square with k degrees of freedom has mean k and variance 2k: 5 standard deviations.
    assert float(chi_square) <= degrees + 5 * math.sqrt(2 * degrees) + 1e-6


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("vocab_size", [1, 2, 5, 258])
def test_every_draw_is_the_reference_s(kernels, filters, vocab_size) -> None:
    logits = random_logits(40, vocab_size)
    logits[1] = 0.0
    logits[2, 1:] = -torch.inf
    seeds, positions = torch.arange(40) - 20, torch.arange(40) * 3
    expected = sample(ReferenceKernels(), logits, filters, seeds, positions)
    assert torch.equal(sample(kernels, logits, filters, seeds, positions), expected)


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_top_p_over_a_large_vocabulary_ranks_as_many_tokens_as_it_needs(kernels, spread) -> None:
    vocab_size = 20_000
    logits = random_logits(3, vocab_size) * spread
    seeds, positions = torch.arange(3), torch.arange(3)
    for filters in [(1.0, 0.0, 0, 0.95), (1.0, 0.0, 3000, 0.9), (1.0, 1e-4, 0, 0.99)]:
        expected = sample(ReferenceKernels(), logits, filters, seeds, positions)
        assert torch.equal(sample(kernels, logits, filters, seeds, positions), expected)


def test_equal_logits_are_kept_by_token_id(kernels) -> None:
    num_draws = 2000
    logits = torch.zeros(num_draws, VOCAB_SIZE)
    seeds, positions = torch.full((num_draws,), 7), torch.arange(num_draws)
    top_k = sample(kernels, logits, (1.0, 0.0, 5, 1.0), seeds, positions)
    assert set(top_k.tolist()) == set(range(5))
    top_p = sample(kernels, logits, (1.0, 0.0, 0, 0.5), seeds, positions)
    assert set(top_p.tolist()) == set(range(VOCAB_SIZE // 2))


def test_a_row_s_draw_is_the_same_alone_and_among_any_neighbours(kernels) -> None:
    vocab_size = 5000
    options = list(FILTERS.values())
    logits = random_logits(len(options), vocab_size)
    seeds, positions = torch.arange(len(options)) * 11, torch.arange(len(options)) + 30
    together = sample(kernels, logits, options, seeds, positions)
    order = torch.randperm(len(options), generator=torch.Generator().manual_seed(5))
    shuffled = sample(
        kernels, logits[order], [options[i] for i in order], seeds[order], positions[order]
    )
    assert torch.equal(shuffled, together[order])
    for row, filters in enumerate(options):
        one = slice(row, row + 1)
        alone = sample(kernels, logits[one], filters, seeds[one], positions[one])
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_a_row_that_no_token_can_be_chosen_for_gives_minus_one_alone(kernels, filters, bad) -> None:
    logits = random_logits(3, 150)
    seeds, positions = torch.arange(3), torch.arange(3)
    expected = sample(kernels, logits, filters, seeds, positions).tolist()
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 140] = bad
    expected[1] = -1
    assert sample(kernels, logits, filters, seeds, positions).tolist() == expected
    assert sample(ReferenceKernels(), logits, filters, seeds, positions)[1] == -1


@pytest.mark.parametrize("filters", HUGE_FILTERS)
def test_of_logits_beyond_float32_over_their_temperature_the_likeliest_is_drawn(
    kernels, filters
) -> None:
    logits, likeliest = huge_logits(VOCAB_SIZE)
    places = torch.arange(len(logits))
    assert sample(kernels, logits, filters, places, places).tolist() == likeliest


def test_different_seeds_and_positions_draw_differently(kernels) -> None:
    logits = torch.zeros(64, VOCAB_SIZE)
    same, counted = torch.full((64,), 9), torch.arange(64)
    assert len(set(sample(kernels, logits, FILTERS["temperature"], same, counted).tolist())) > 20
    assert len(set(sample(kernels, logits, FILTERS["temperature"], counted, same).tolist())) > 20


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 258])
def test_masks_follow_the_reference(kernels, vocab_size) -> None:
    logits = random_logits(5, vocab_size)
    logits[2, 0] = -torch.inf
    num_words = -(-vocab_size // 32)
    allowed = torch.randint(
        -(2**31), 2**31, (3, num_words), generator=torch.Generator().manual_seed(2)
    ).int()
    rows = torch.tensor([4, 0, 2])
    expected = logits.clone()
    ReferenceKernels().mask_logits(expected, rows, allowed)
    kernels.mask_logits(logits, rows, allowed)
    assert torch.equal(logits, expected)
    assert vocab_size == 1 or bool(torch.isinf(expected[rows]).any(dim=1).all())


def test_biases_follow_the_reference_and_a_ban_wins(kernels) -> None:
    logits = random_logits(4)
    logits[0, 5] = -torch.inf
    rows = torch.tensor([3, 0, 0, 1, 3, 3])
    token_ids = torch.tensor([0, 5, 63, 7, 1, 0])
    biases = torch.tensor([1.5, 100.0, -100.0, -torch.inf, 0.25, -torch.inf])
    expected = logits.clone()
    ReferenceKernels().bias_logits(expected, rows, token_ids, biases)
    kernels.bias_logits(logits, rows, token_ids, biases)
    assert torch.equal(logits, expected)
    assert logits[3, 0] == logits[1, 7] == logits[0, 5] == -torch.inf


@pytest.mark.parametrize("vocab_size", [3, 258])
def test_penalties_follow_the_reference(kernels, vocab_size) -> None:
    logits = random_logits(7, vocab_size)
    token_ids = torch.randint(
        0, vocab_size, (6, 30), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    options = {
        "rows": torch.tensor([0, 5, 2, 3, 1, 4]),
        "token_ids": token_ids,
        "prompt_lens": torch.tensor([1, 30, 10, 10, 10, 5]),
        "seq_lens": torch.tensor([1, 30, 10, 30, 20, 25]),
        "repetition": torch.tensor([1.3, 1.3, 0.8, 1.0, 1.0, 2.0]),
        "presence": torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0, -1.0]),
        "frequency": torch.tensor([0.5, 0.5, 0.0, 0.0, 0.3, 0.7]),
    }
    expected = logits.clone()
    ReferenceKernels().penalize(expected, **options)
    kernels.penalize(logits, **options)
    assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)


def test_neutral_penalties_and_what_lies_beyond_a_sequence_change_no_bit(kernels) -> None:
    logits = random_logits(2)
    raw = logits.clone()
    token_ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    kernels.penalize(
        logits,
        rows=torch.tensor([0, 1]),
        token_ids=token_ids,
        prompt_lens=torch.tensor([1, 0]),
        seq_lens=torch.tensor([4, 0]),
        repetition=torch.tensor([1.0, 2.0]),
        presence=torch.tensor([0.0, 2.0]),
        frequency=torch.tensor([0.0, 2.0]),
    )
    assert torch.equal(logits, raw)


@pytest.mark.parametrize("vocab_size", [5, 258])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_follow_the_reference(kernels, vocab_size, num_top) -> None:
    logits = random_logits(7, vocab_size)
    logits[0, :] = 1.0
    logits[1, 1:] = -torch.inf
    chosen = torch.tensor([0, 0, 1, 2, 3, 4, 4])
    expected = ReferenceKernels().token_logprobs(logits, chosen, num_top)
    actual = kernels.token_logprobs(logits, chosen, num_top)
    for value, reference in zip(actual, expected, strict=True):
        assert torch.allclose(value.double(), reference.double(), rtol=1e-6, atol=1e-6)
