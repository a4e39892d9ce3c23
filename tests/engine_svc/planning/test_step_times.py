"""Estimates of step times approach what is observed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_svc.planning.step_times import StepTimes


def seconds_of(num_tokens: int) -> float:
    return 0.010 + 0.001 * num_tokens


def test_what_was_observed_is_expected_again() -> None:
    times = StepTimes()
    assert times.is_empty
    for _ in range(40):
        for num_tokens in (1, 2, 5, 9, 17, 64):
            times.observe(num_tokens, seconds_of(num_tokens))
    for num_tokens in (1, 2, 5, 7, 9, 12, 17, 40, 64):
        assert times.estimate(num_tokens) == pytest.approx(seconds_of(num_tokens), rel=0.05)


def test_what_was_never_observed_is_guessed_to_grow_less_than_its_tokens() -> None:
    times = StepTimes()
    times.observe(4, 0.010)
    assert times.estimate(4) == pytest.approx(0.010)
    assert 0.010 < times.estimate(8) < 0.020
    assert 0.005 < times.estimate(2) < 0.010


def test_a_slower_machine_makes_all_estimates_slower() -> None:
    times = StepTimes()
    for _ in range(40):
        for num_tokens in (1, 8):
            times.observe(num_tokens, seconds_of(num_tokens))
    for _ in range(40):
        times.observe(1, 3 * seconds_of(1))
    assert times.estimate(1) == pytest.approx(3 * seconds_of(1), rel=0.1)
    assert times.estimate(8) > 2 * seconds_of(8)


def test_one_step_that_was_held_up_changes_little() -> None:
    times = StepTimes()
    for _ in range(40):
        times.observe(1, 0.010)
    times.observe(1, 5.0)
    assert times.estimate(1) < 0.015


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-4, 10)), min_size=1, max_size=30),
    st.integers(1, 10_000),
)
def test_estimates_are_always_positive_numbers(
    steps: list[tuple[int, float]], num_tokens: int
) -> None:
    times = StepTimes()
    for observed in steps:
        times.observe(*observed)
    assert 0 < times.estimate(num_tokens) < 1e6
