"""Biases and bans against a plain account of what each row asked for and has sampled so far."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.compute.token_biases import TokenBiasRows
from engine_svc.planning.step import SamplingParameters

VOCAB_SIZE = 8
EOS, STOP = 6, 7


def parameters(**options: object) -> SamplingParameters:
    return SamplingParameters(max_tokens=50, **options)  # type: ignore[arg-type]


class Rows:
    """Bias rows with the batch's arrays beside them."""

    def __init__(self, num_rows: int) -> None:
        self.token_ids = np.zeros((num_rows, 40), np.int32)
        self.prompt_lens = np.zeros(num_rows, np.int64)
        self.lens: dict[int, int] = {}
        self.biases = TokenBiasRows(self.token_ids, self.prompt_lens, VOCAB_SIZE)

    def start(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int], sampling: SamplingParameters
    ) -> bool:
        tokens = [*prompt, *outputs]
        self.token_ids[row, : len(tokens)] = tokens
        self.prompt_lens[row], self.lens[row] = len(prompt), len(tokens)
        return self.biases.start(row, sampling)

    def append(self, row: int, token_id: int) -> None:
        self.token_ids[row, self.lens[row]] = token_id
        self.lens[row] += 1

    def select(
        self, rows: Sequence[int], drafts: Sequence[Sequence[int]] | None = None
    ) -> list[dict[int, float]]:
        """For each of `rows`, and after each of its drafts, the sum of its biases by token id."""
        places: list[tuple[int, int]] = []
        for row, draft in zip(rows, drafts or [()] * len(rows), strict=True):
            first = self.lens[row]
            self.token_ids[row, first : first + len(draft)] = draft
            places += [(row, first + count) for count in range(len(draft) + 1)]
        place_rows, lens = np.array(places, np.int64).T
        selected = self.biases.select(place_rows, lens)
        result: list[dict[int, float]] = [{} for _ in places]
        for place, token_id, bias in zip(*(part.tolist() for part in selected), strict=True):
            result[place][token_id] = result[place].get(token_id, 0.0) + bias
        return result


def expected(
    prompt: Sequence[int], outputs: Sequence[int], sampling: SamplingParameters
) -> dict[int, float]:
    result: dict[int, float] = {}
    for token_id, bias in sampling.logit_bias:
        result[token_id] = result.get(token_id, 0.0) + bias
    if len(outputs) < sampling.min_tokens:
        for token_id in sampling.eos_token_ids | sampling.stop_token_ids:
            if token_id < VOCAB_SIZE:
                result[token_id] = -math.inf
    for word in sampling.bad_words:
        if [*outputs, word[-1]][-len(word) :] == list(word):
            result[word[-1]] = -math.inf
    return result


tokens = st.integers(0, VOCAB_SIZE - 1)
samplings = st.builds(
    parameters,
    min_tokens=st.integers(0, 6),
    eos_token_ids=st.sampled_from([frozenset(), frozenset({EOS}), frozenset({EOS, 100_000})]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({STOP})]),
    logit_bias=st.lists(st.tuples(tokens, st.sampled_from([-100.0, 0.5, 2.0])), max_size=4).map(
        tuple
    ),
    bad_words=st.lists(
        # Few ids, so that words are completed often.
        st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
        max_size=4,
    ).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_row_has_its_own_biases_in_every_step(data: st.DataObject) -> None:
    rows = Rows(4)
    requests: dict[int, tuple[list[int], list[int], SamplingParameters]] = {}
    for _ in range(data.draw(st.integers(1, 5))):
        for row in data.draw(st.lists(st.integers(0, 3), unique=True)):
            prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
            outputs = data.draw(st.lists(st.integers(0, 2), max_size=4))
            sampling = data.draw(samplings)
            requests[row] = (prompt, outputs, sampling)
            assert rows.start(row, prompt, outputs, sampling) or not expected(*requests[row])
        for _ in range(data.draw(st.integers(1, 3))):
            if not requests:
                continue
            in_step = data.draw(st.permutations(sorted(requests)))
            in_step = in_step[: data.draw(st.integers(1, len(in_step)))]
            drafts = [data.draw(st.lists(st.integers(0, 2), max_size=3)) for _ in in_step]
            assert rows.select(in_step, drafts) == [
                expected(prompt, [*outputs, *draft[:count]], sampling)
                for (prompt, outputs, sampling), draft in zip(
                    map(requests.__getitem__, in_step), drafts, strict=True
                )
                for count in range(len(draft) + 1)
            ]
            for row in in_step:
                token_id = data.draw(st.integers(0, 2))
                requests[row][1].append(token_id)
                rows.append(row, token_id)


def test_min_tokens_bans_the_end_until_so_many_tokens_were_sampled_before_a_resume_or_after() -> (
    None
):
    sampling = parameters(
        min_tokens=3, eos_token_ids=frozenset({EOS}), stop_token_ids=frozenset({STOP})
    )
    banned = {EOS: -math.inf, STOP: -math.inf}
    for num_before in range(5):
        rows = Rows(1)
        # The prompt does not count.
        rows.start(0, [1] * 10, [2] * num_before, sampling)
        for num_outputs in range(num_before, 6):
            assert rows.select([0]) == [banned if num_outputs < 3 else {}]
            rows.append(0, 2)


@pytest.mark.parametrize(
    ("prompt", "outputs", "banned"),
    [
        ([1], [], {5}),
        ([1], [1], {5, 2}),
        ([1], [1, 2], {5, 3}),
        # Prompt tokens do not count.
        ([1, 1], [2], {5}),
        ([1, 2], [], {5}),
        ([1], [4, 1, 2], {5, 3}),
        ([1], [1, 2, 4], {5}),
    ],
)
def test_bad_words_ban_a_token_when_it_would_complete_a_word_of_the_output(
    prompt: list[int], outputs: list[int], banned: set[int]
) -> None:
    rows = Rows(1)
    rows.start(0, prompt, outputs, parameters(bad_words=((5,), (1, 2), (1, 2, 3))))
    assert set(rows.select([0])[0]) == banned


def test_a_row_without_biases_says_so() -> None:
    rows = Rows(2)
    assert not rows.start(0, [1], [], parameters())
    assert rows.start(0, [1], [], parameters(bad_words=((1, 2),)))
    # One that is not asked for any more leaves nothing behind.
    assert not rows.start(0, [1], [1], parameters())
    assert rows.select([0]) == [{}]
