"""The sampler draws from the exact distribution that the order of its stages gives.

What is expected comes from a plain-Python account of the order (tests/fakes/sampling_reference.py).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_svc.compute.sampler import SampledBatch, Sampler
from engine_svc.compute.sampling_rows import SamplingInputs, SamplingRows
from engine_svc.planning.step import SamplingError, SamplingParameters
from kernels import select_kernels
from kernels.noise import gumbel_noise
from tests.fakes.sampling_reference import (
    banned_tokens,
    edited_logits,
    exact_distribution,
    kept_scores,
)

VOCAB_SIZE = 40
EOS = 3
PROMPT = [0, 1, 2, 30]
OUTPUTS = [4, 5, 4, 6, 7, 4, 8, 9]
NUM_DRAWS, NUM_ROWS = 20_000, 500
SMALLEST_P_VALUE = 1e-4
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
ALLOWED = frozenset(range(0, VOCAB_SIZE, 2)) | {9, 11}
BIASES = ((4, 2.0), (12, 1.5), (14, -2.0), (16, -100.0), (3, 3.0))
# The second completes a word after the outputs, the third does not.
BAD_WORDS = ((12,), (8, 9, 10), (9, 8, 20))
OPTIONS: dict[str, dict[str, object]] = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1.8": {"temperature": 1.8},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "repetition_penalty below 1": {"repetition_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "logit_bias": {"logit_bias": BIASES},
    "allowed_token_ids": {"allowed_token_ids": ALLOWED},
    "bad_words": {"bad_words": BAD_WORDS},
    "min_tokens not met": {"min_tokens": len(OUTPUTS) + 1},
    "min_tokens met": {"min_tokens": len(OUTPUTS)},
    "top_k, then top_p": {"temperature": 1.5, "top_k": 8, "top_p": 0.6},
    "min_p, then top_k": {"temperature": 1.5, "min_p": 0.15, "top_k": 9},
    "min_p, then top_p": {"temperature": 1.5, "min_p": 0.15, "top_p": 0.7},
    "penalties, then the filters": PENALTIES | {"temperature": 1.3, "top_k": 12, "top_p": 0.9},
    "bias, then penalties": PENALTIES | {"logit_bias": BIASES},
    "bias and penalties, then greedy": PENALTIES | {"logit_bias": BIASES, "temperature": 0.0},
    "mask, then bias": {"allowed_token_ids": ALLOWED, "logit_bias": BIASES},
    "everything": PENALTIES
    | {
        "temperature": 1.4,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.02,
        "logit_bias": BIASES,
        "allowed_token_ids": ALLOWED,
        "bad_words": BAD_WORDS,
        "min_tokens": 20,
    },
}


def parameters(**options: object) -> SamplingParameters:
    values = {"max_tokens": 100, "eos_token_ids": frozenset({EOS})} | options
    return SamplingParameters(**values)  # type: ignore[arg-type]


def fixed_logits() -> list[float]:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(VOCAB_SIZE, generator=generator) * 1.5
    logits[EOS], logits[12] = 3.0, 2.5
    return logits.tolist()


def gather(
    requests: Sequence[tuple[Sequence[int], Sequence[int], SamplingParameters]], vocab_size: int
) -> SamplingInputs:
    """The inputs of a step with these (prompt, outputs, parameters)."""
    seq_lens = np.array([len(prompt) + len(outputs) for prompt, outputs, _ in requests])
    token_ids = np.zeros((len(requests), int(seq_lens.max())), np.int32)
    prompt_lens = np.array([len(prompt) for prompt, _, _ in requests])
    rows = SamplingRows(token_ids, prompt_lens, vocab_size)
    for row, (prompt, outputs, sampling) in enumerate(requests):
        token_ids[row, : seq_lens[row]] = [*prompt, *outputs]
        rows.start(row, sampling)
    return rows.gather(np.arange(len(requests)), seq_lens)


def sample(logits: Tensor, inputs: SamplingInputs) -> SampledBatch:
    return Sampler(select_kernels(torch.device("cpu"))).sample(logits.clone(), inputs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_tokens_come_as_often_as_the_exact_distribution_says(options: dict[str, object]) -> None:
    sampling = parameters(**options)
    exact = exact_distribution(fixed_logits(), PROMPT, OUTPUTS, sampling)
    inputs = gather([(PROMPT, OUTPUTS, sampling)] * NUM_ROWS, VOCAB_SIZE)
    logits = torch.tensor(fixed_logits()).expand(NUM_ROWS, -1)
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    for first_seed in range(0, NUM_DRAWS, NUM_ROWS):
        seeds = torch.arange(first_seed, first_seed + NUM_ROWS)
        batch = sample(logits, dataclasses.replace(inputs, seeds=seeds))
        assert not any(batch.errors)
        counts += torch.bincount(batch.token_ids, minlength=VOCAB_SIZE)
    for token, probability in enumerate(exact):
        assert probability or not counts[token], f"token {token} is impossible"
    assert p_value(counts.tolist(), exact) > SMALLEST_P_VALUE


def p_value(counts: Sequence[int], exact: Sequence[float]) -> float:
    """Of Pearson's chi-square test; tokens that are hardly expected count together."""
    num_draws = sum(counts)
    cells = [
        (count, probability * num_draws)
        for count, probability in zip(counts, exact, strict=True)
        if probability
    ]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    if len(cells) == 1:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    degrees = len(cells) - 1
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_the_test_itself_notices_a_wrong_distribution() -> None:
    exact = exact_distribution(fixed_logits(), PROMPT, OUTPUTS, parameters())
    warmer = exact_distribution(fixed_logits(), PROMPT, OUTPUTS, parameters(temperature=1.1))
    counts = [round(NUM_DRAWS * probability) for probability in warmer]
    assert p_value(counts, exact) < SMALLEST_P_VALUE


def test_every_option_changes_the_distribution() -> None:
    plain = exact_distribution(fixed_logits(), PROMPT, OUTPUTS, parameters())
    for name, options in OPTIONS.items():
        changed = exact_distribution(fixed_logits(), PROMPT, OUTPUTS, parameters(**options))
        assert (changed == plain) == (name in ("temperature 1", "min_tokens met")), name


token_ids = st.integers(0, VOCAB_SIZE - 1)
some_samplings = st.builds(
    parameters,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 5, 39, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.sampled_from([0, 0, 2, 50]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({7, 39})]),
    logit_bias=st.just(())
    | st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0])).map(
        lambda biases: tuple(biases.items())
    ),
    allowed_token_ids=st.just(frozenset()) | st.frozensets(token_ids),
    bad_words=st.just(())
    | st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)).map(tuple),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 3),
)
requests = st.tuples(
    st.lists(token_ids, min_size=1, max_size=6),
    st.lists(st.integers(0, 3) | token_ids, max_size=8),
    some_samplings,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(requests, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_every_row_of_any_batch_is_sampled_as_by_the_plain_reference(
    batch: list[tuple[list[int], list[int], SamplingParameters]], logits_seed: int
) -> None:
    generator = torch.Generator().manual_seed(logits_seed)
    logits = torch.randn(len(batch), VOCAB_SIZE, generator=generator) * 3
    inputs = gather(batch, VOCAB_SIZE)
    result = sample(logits, inputs)
    noise = gumbel_noise(inputs.seeds, inputs.positions, VOCAB_SIZE).tolist()
    for row, (prompt, outputs, sampling) in enumerate(batch):
        raw = logits[row].tolist()
        edited = edited_logits(raw, prompt, outputs, sampling)
        if max(edited) == -math.inf:
            assert result.errors[row] is SamplingError.NO_TOKEN_LEFT
            continue
        assert result.errors[row] is None
        chosen = int(result.token_ids[row])
        assert chosen not in banned_tokens(outputs, sampling)
        if is_clear(edited, sampling, noise[row]):
            assert chosen == best_token(kept_scores(edited, sampling), noise[row])
        listed = result.logprobs[row]
        assert (listed is not None) == sampling.logprobs
        if listed is not None:
            total = math.log(sum(math.exp(logit) for logit in raw))
            assert listed.logprob == pytest.approx(raw[chosen] - total, abs=1e-4)
            likeliest = sorted(range(VOCAB_SIZE), key=lambda token: -raw[token])
            assert list(listed.top_token_ids) == likeliest[: sampling.top_logprobs]


def best_token(scores: dict[int, float], noise: Sequence[float]) -> int:
    return max(scores, key=lambda token: scores[token] + noise[token])


def is_clear(edited: list[float], sampling: SamplingParameters, noise: Sequence[float]) -> bool:
    """Whether rounding to float32 cannot change which token is chosen."""
    bounds = [kept_scores(edited, sampling, slack) for slack in (-1e-4, 0.0, 1e-4)]
    if not bounds[0].keys() == bounds[1].keys() == bounds[2].keys():
        return False
    if sampling.temperature == 0.0:
        first, second = sorted(edited)[:-3:-1]
        return first - second > 1e-4 * max(1.0, abs(first))
    totals = sorted((score + noise[token] for token, score in bounds[1].items()), reverse=True)
    return len(totals) == 1 or totals[0] - totals[1] > 1e-3
