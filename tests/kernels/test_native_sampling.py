"""The native sampler: the same tokens as torch's, the same bits in every build, batch and pool."""

import math
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuKernels
from kernels.cpu.library import runnable
from kernels.cpu.native_sampling import NativeSampling
from kernels.noise import gumbel_noise
from kernels.reference import ReferenceKernels
from tests.fakes.native_ops import open_sampling

BUILDS = runnable()
# temperature, min_p, top_k, top_p
FILTERS = {
    "none": (1.0, 0.0, 0, 1.0),
    "warm": (2.0, 0.0, 0, 1.0),
    "min_p": (1.0, 0.05, 0, 1.0),
    "min_p 1": (1.0, 1.0, 0, 1.0),
    "few of top_k": (0.7, 0.0, 20, 1.0),
    "many of top_k": (1.3, 0.0, 2000, 1.0),
    "top_p": (1.0, 0.0, 0, 0.9),
    "nearly all of top_p": (2.0, 0.0, 0, 0.9999),
    "little of top_p": (1.0, 0.0, 0, 0.01),
    "top_k, top_p": (1.0, 0.0, 50, 0.8),
    "many of top_k, top_p": (1.0, 0.0, 3000, 0.8),
    "min_p, top_p": (1.5, 0.01, 0, 0.9),
    "all": (2.0, 0.02, 30, 0.9),
    "greedy": (0.0, 0.0, 0, 1.0),
    "hardly warm": (2e-5, 0.0, 0, 0.9),
}


@pytest.fixture(scope="module")
def samplers() -> Iterator[dict[str, NativeSampling]]:
    """One of each build, and the last with several threads."""
    with ExitStack() as stack:
        opened = {name: stack.enter_context(open_sampling(name)) for name in BUILDS}
        if BUILDS:
            opened["threads"] = stack.enter_context(open_sampling(BUILDS[-1], num_threads=3))
        yield opened


@pytest.fixture(params=[*BUILDS, "threads"] if BUILDS else [])
def sampler(request: pytest.FixtureRequest, samplers: dict[str, NativeSampling]) -> NativeSampling:
    return samplers[request.param]


def kinds_of_logits(vocab_size: int) -> Tensor:
    """A row of each kind that thresholds could stumble over."""
    generator = torch.Generator().manual_seed(vocab_size)
    normal = torch.randn(8, vocab_size, generator=generator)
    rows = [scale * normal[i] for i, scale in enumerate((0.05, 1.0, 4.0, 1e4))]
    # Equal logits, all and in groups; most of them impossible; one far from all others.
    rows += [torch.full((vocab_size,), -3.5), (normal[4] * 2).round() - 0.0]
    rows.append(normal[5].masked_fill(torch.rand(vocab_size, generator=generator) < 0.9, -math.inf))
    rows[-1][vocab_size // 2] = 0.5
    rows.append(normal[6].clone())
    rows[-1][0] = -1e30
    # As a model's: few likely ones, a long tail.
    ranks = torch.randperm(vocab_size, generator=generator).float() + 1
    rows.append(-1.5 * ranks.log() + 0.3 * normal[7])
    return torch.stack(rows)


def draw(kernels: object, logits: Tensor, filters: tuple[float, float, int, float]) -> Tensor:
    temperature, min_p, top_k, top_p = filters
    n = len(logits)
    return kernels.sample(  # type: ignore[attr-defined]
        logits,
        temperature=torch.full((n,), temperature),
        min_p=torch.full((n,), min_p),
        top_k=torch.full((n,), top_k),
        top_p=torch.full((n,), top_p),
        seeds=torch.arange(n) * 2**55 - 2**60,
        positions=torch.arange(n) * 1000,
    )


@pytest.mark.parametrize("vocab_size", [1, 3, 64, 65, 1000, 20_011])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_tokens_are_those_of_the_torch_sampler(sampler, filters, vocab_size) -> None:
    logits = kinds_of_logits(vocab_size)
    assert torch.equal(draw(sampler, logits, filters), draw(CpuKernels(), logits, filters))


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_exactly_the_tokens_that_filters_keep_can_come(sampler, filters) -> None:
    num_draws, vocab_size = 3000, 300
    kinds = kinds_of_logits(vocab_size)
    temperature, min_p, top_k, top_p = filters
    # As the op is given them: rounded to float32.
    exact = (*torch.tensor([temperature, min_p]).tolist(), top_k, float(torch.tensor(top_p)))
    for logits in (kinds[4], kinds[5], kinds[8]):
        probabilities = ReferenceKernels().probabilities(logits, *exact)
        drawn = draw(sampler, logits.expand(num_draws, -1), filters)
        counts = torch.bincount(drawn, minlength=vocab_size)
        assert not counts[probabilities == 0].any()
        assert counts[probabilities * num_draws > 20].all()


def test_without_filters_the_noise_is_that_of_all_backends(sampler) -> None:
    logits = torch.zeros(400, 3000)
    seeds, positions = torch.arange(400) * 2**54, torch.arange(400) + 2**32 - 400
    ones, none = torch.ones(400), torch.zeros(400)
    drawn = sampler.sample(logits, ones, none, torch.zeros(400).long(), ones, seeds, positions)
    assert torch.equal(drawn, gumbel_noise(seeds, positions, 3000).argmax(dim=-1))


@pytest.mark.parametrize("vocab_size", [70, 5000])
def test_a_row_gives_the_same_bits_in_any_build_and_batch(samplers, vocab_size) -> None:
    logits = kinds_of_logits(vocab_size)
    chosen = torch.arange(len(logits))
    first, *others = samplers.values()
    expected = {name: draw(first, logits, filters) for name, filters in FILTERS.items()}
    logprobs = first.token_logprobs(logits, chosen, 20)
    for sampler in others:
        for name, filters in FILTERS.items():
            assert torch.equal(draw(sampler, logits, filters), expected[name])
        for value, other in zip(logprobs, sampler.token_logprobs(logits, chosen, 20), strict=True):
            assert torch.equal(value, other)
    for row in range(len(logits)):
        alone = first.token_logprobs(logits[row : row + 1], chosen[row : row + 1], 3)
        for value, together in zip(alone, logprobs, strict=True):
            assert torch.equal(value[0], together[row, :3] if together.ndim > 1 else together[row])


@pytest.mark.parametrize("vocab_size", [1, 65, 20_011])
@pytest.mark.parametrize("num_top", [0, 1, 20, 400])
def test_the_likeliest_tokens_and_their_logprobs_are_the_reference_s(
    sampler, vocab_size, num_top
) -> None:
    num_top = min(num_top, vocab_size)
    logits = kinds_of_logits(vocab_size)
    chosen = torch.arange(len(logits)) % vocab_size
    expected = ReferenceKernels().token_logprobs(logits, chosen, num_top)
    logprobs, top_ids, top_logprobs = sampler.token_logprobs(logits, chosen, num_top)
    assert torch.equal(top_ids, expected[1])
    assert torch.allclose(logprobs, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.allclose(top_logprobs, expected[2], rtol=1e-6, atol=1e-6)


def test_tokens_whose_logprobs_round_to_the_same_are_listed_by_id(sampler) -> None:
    logits = torch.zeros(1, 500)
    logits[0, 490] = 1.0
    logits[0, 100] = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    _, top_ids, top_logprobs = sampler.token_logprobs(logits, torch.tensor([0]), 1)
    _, both_ids, both = sampler.token_logprobs(logits, torch.tensor([0]), 2)
    assert both[0, 0] == both[0, 1] == top_logprobs[0, 0]
    assert both_ids.tolist() == [[100, 490]]
    assert top_ids.tolist() == [[100]]


def test_logprobs_of_a_row_that_is_no_numbers_are_none_and_ids_in_range(sampler) -> None:
    logits = kinds_of_logits(100)[:4].clone()
    logits[1, 99], logits[2, 0] = math.nan, math.inf
    logits[3] = -math.inf
    logprobs, top_ids, top_logprobs = sampler.token_logprobs(logits, torch.zeros(4).long(), 5)
    assert torch.isnan(logprobs).tolist() == [False, True, True, True]
    assert torch.isnan(top_logprobs).all(dim=1).tolist() == [False, True, True, True]
    assert int(top_ids.min()) >= 0 and int(top_ids.max()) < 100


def test_a_mask_leaves_what_it_allows_and_hides_no_nan(sampler) -> None:
    logits = torch.zeros(2, 40)
    logits[1, 3], logits[1, 35] = math.nan, math.nan
    before = logits.clone()
    allowed = torch.tensor([[0b1001, 1 << 6]], dtype=torch.int32)
    sampler.mask_logits(logits, torch.tensor([1]), allowed)
    assert torch.equal(logits[0], before[0])
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [0, 38]
    assert torch.isnan(logits[1]).nonzero().flatten().tolist() == [3, 35]


def test_penalties_are_torch_s_bit_for_bit_in_rows_of_a_wider_buffer(sampler) -> None:
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(5, 3100, generator=generator) * 5
    token_ids = torch.randint(0, 3000, (3, 900), generator=generator, dtype=torch.int32)
    token_ids[0, :400] = 7
    options = (
        torch.tensor([4, 0, 2]),
        token_ids,
        torch.tensor([100, 900, 0]),
        torch.tensor([900, 900, 500]),
        torch.tensor([1.3, 0.7, 1.0]),
        torch.tensor([0.1, 1.0, -0.3]),
        torch.tensor([0.01, 1.0, -0.7]),
    )
    expected = buffer.clone()
    CpuKernels().penalize(expected[:, :3000], *options)
    sampler.penalize(buffer[:, :3000], *options)
    assert torch.equal(buffer, expected)
