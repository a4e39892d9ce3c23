"""Ranks that have a part of the vocabulary each choose the tokens that one rank would."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_svc.compute.model.sharded_source import VocabShard
from engine_svc.compute.parallel_filters import Filters, kept_tokens
from engine_svc.compute.parallel_keys import Masses, ids_of, ordered_bits, ranking_keys, values_of
from engine_svc.compute.parallel_sampling import ParallelSampling
from engine_svc.compute.ranks import Ranks
from engine_svc.compute.sampler import SampledBatch, Sampler
from engine_svc.compute.sampling_rows import SamplingInputs, SamplingRows
from engine_svc.planning.step import SamplingError, SamplingParameters
from kernels import KernelConfig, select_kernels
from kernels.reference import ReferenceKernels
from tests.fakes.thread_ranks import run_ranks

VOCAB_SIZE = 300
# Not a multiple of 32, nor the same for each.
SIZES = {1: [300], 2: [160, 140], 4: [96, 96, 64, 44]}
TORCH = select_kernels(torch.device("cpu"), KernelConfig("float32", implementation="torch"))
Request = tuple[Sequence[int], Sequence[int], SamplingParameters]


def shard(ranks: Ranks) -> VocabShard:
    sizes = SIZES[ranks.size]
    return VocabShard(sum(sizes[: ranks.rank]), sizes[ranks.rank], VOCAB_SIZE)


def gather(requests: Sequence[Request]) -> SamplingInputs:
    seq_lens = torch.tensor([len(prompt) + len(outputs) for prompt, outputs, _ in requests]).numpy()
    token_ids = torch.zeros(len(requests), int(seq_lens.max()), dtype=torch.int32).numpy()
    prompt_lens = torch.tensor([len(prompt) for prompt, _, _ in requests]).numpy()
    rows = SamplingRows(token_ids, prompt_lens, VOCAB_SIZE)
    for row, (prompt, outputs, sampling) in enumerate(requests):
        token_ids[row, : seq_lens[row]] = [*prompt, *outputs]
        rows.start(row, sampling)
    return rows.gather(torch.arange(len(requests)).numpy(), seq_lens)


def sample_on(ranks: Ranks, logits: Tensor, inputs: SamplingInputs) -> SampledBatch:
    own = shard(ranks)
    own_logits = logits[:, own.first : own.first + own.size].clone()
    result = Sampler(ParallelSampling(TORCH, ranks, own)).sample(own_logits, inputs)
    return dataclasses.replace(result, token_ids=result.token_ids.clone())


def sample(size: int, logits: Tensor, inputs: SamplingInputs) -> SampledBatch:
    """What all of `size` ranks chose."""
    results = run_ranks(size, lambda ranks: sample_on(ranks, logits, inputs))
    for result in results[1:]:
        assert result.token_ids.equal(results[0].token_ids)
        assert result.logprobs == results[0].logprobs
        assert result.errors == results[0].errors
    return results[0]


ids = st.integers(0, VOCAB_SIZE - 1)
samplings = st.builds(
    SamplingParameters,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01, 0.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 64, 299, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.sampled_from([0, 50]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({7, 170})]),
    logit_bias=st.just(())
    | st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0])).map(
        lambda biases: tuple(biases.items())
    ),
    allowed_token_ids=st.just(frozenset()) | st.frozensets(ids),
    bad_words=st.just(())
    | st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)).map(tuple),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 5),
)
requests = st.tuples(
    st.lists(ids, min_size=1, max_size=6), st.lists(st.integers(0, 3) | ids, max_size=8), samplings
)


@pytest.mark.parametrize("size", [2, 4])
@settings(max_examples=25, deadline=None)
@given(batch=st.lists(requests, min_size=1, max_size=5), logits_seed=st.integers(0, 2**32 - 1))
def test_ranks_choose_what_one_would_with_all_options(
    size: int, batch: list[Request], logits_seed: int
) -> None:
    generator = torch.Generator().manual_seed(logits_seed)
    logits = torch.randn(len(batch), VOCAB_SIZE, generator=generator) * 3
    # Some are equal, over the borders of ranks.
    logits[:, ::7] = logits[:, ::7].round()
    inputs = gather(batch)
    expected = Sampler(TORCH).sample(logits.clone(), inputs)
    result = sample(size, logits, inputs)
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert result.errors == expected.errors
    for listed, other in zip(result.logprobs, expected.logprobs, strict=True):
        assert (listed is None) == (other is None)
        if listed is not None and other is not None:
            assert listed.top_token_ids == other.top_token_ids
            assert listed.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert listed.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_row_that_cannot_be_sampled_fails_alone_on_all_ranks(size: int, bad: float) -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    seeded = SamplingParameters(1, temperature=1.0, top_k=20, top_p=0.9, logprobs=True, seed=1)
    inputs = gather([([1], [], seeded)] * 3)
    healthy = sample(size, logits, inputs)
    if bad == -torch.inf:
        logits[1] = bad
    else:
        logits[1, 290] = bad
    result = sample(size, logits, inputs)
    assert result.errors == [None, SamplingError.BAD_LOGITS, None]
    for row in (0, 2):
        assert result.token_ids[row] == healthy.token_ids[row]
        assert result.logprobs[row] == healthy.logprobs[row]


def test_a_mask_that_leaves_nothing_on_one_rank_or_on_any() -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    seeded = SamplingParameters(1, temperature=1.0, top_p=0.5, seed=1)
    last = dataclasses.replace(seeded, allowed_token_ids=frozenset({299}))
    none = dataclasses.replace(last, logit_bias=((299, -math.inf),))
    result = sample(4, logits, gather([([1], [], last), ([1], [], none)]))
    assert result.errors == [None, SamplingError.NO_TOKEN_LEFT]
    assert result.token_ids[0] == 299


def test_the_whole_vocabulary_can_be_listed() -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    chosen = torch.tensor([0, 299])
    expected = ReferenceKernels().token_logprobs(logits, chosen, VOCAB_SIZE)

    def score(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        own = shard(ranks)
        part = logits[:, own.first : own.first + own.size]
        return ParallelSampling(TORCH, ranks, own).token_logprobs(part, chosen, VOCAB_SIZE)

    for logprobs, top_ids, top in run_ranks(4, score):
        assert torch.allclose(logprobs, expected[0], atol=1e-6)
        assert top_ids.equal(expected[1])
        assert torch.allclose(top, expected[2], atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_of_equal_tokens_at_a_bound_those_with_the_lowest_ids_are_kept(size: int) -> None:
    scores = torch.zeros(3, VOCAB_SIZE)
    scores[:, 150] = 1.0
    # 150 and the first 199 others; half of all; 150 alone.
    filters = Filters(
        torch.tensor([0.0, 0.0, 0.5]), torch.tensor([200, 0, 0]), torch.tensor([1.0, 0.5, 0.3])
    )

    def keep(ranks: Ranks) -> Tensor:
        own = shard(ranks)
        part = scores[:, own.first : own.first + own.size]
        kept = kept_tokens(part, torch.ones(3), filters, Masses(VOCAB_SIZE), ranks)
        assert kept is not None
        return kept

    kept = torch.cat(run_ranks(size, keep), dim=1)
    others = [place for place in range(VOCAB_SIZE) if place != 150]
    assert kept[0].nonzero()[:, 0].tolist() == sorted([150, *others[:199]])
    # 1 + 299 / e is 111.0, of which half is 1 + 148.3 / e.
    assert kept[1].nonzero()[:, 0].tolist() == sorted([150, *others[:149]])
    assert kept[2].nonzero()[:, 0].tolist() == [150]


def test_keys_order_as_values_and_lower_ids_do_and_give_them_back() -> None:
    numbers = [-torch.inf, -1e30, -2.0, -1e-45, 0.0, 1e-45, 1.0, 1e30, torch.inf, torch.nan]
    values = torch.tensor(numbers)
    bits = ordered_bits(values)
    assert bits.diff().gt(0).all() and bits.min() >= 0 and bits.max() < 1 << 32
    assert ordered_bits(-values[-1:]).equal(bits[-1:])
    assert ordered_bits(torch.tensor([-0.0])).equal(bits[4:5])
    token_ids = torch.tensor([0, 5, (1 << 24) - 1])
    assert ranking_keys(values[:3], token_ids.int()).equal(ranking_keys(values[:3], token_ids))
    keys = ranking_keys(values[:, None], token_ids)
    assert keys.flatten().sort().values.equal(keys.flip(1).flatten())
    assert ids_of(keys).equal(token_ids.expand_as(keys))
    assert values_of(keys)[:-1].equal(values[:-1, None].expand(-1, 3))
    assert values_of(keys)[-1].isnan().all()
