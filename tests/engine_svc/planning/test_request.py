"""When a request ends by its own rules."""

import pytest

from engine_svc.planning.request import Finish, FinishReason, Request
from engine_svc.planning.step import SamplingParameters

EOS, STOP = 50, 60
SAMPLING = SamplingParameters(
    max_tokens=3, eos_token_ids=frozenset({EOS}), stop_token_ids=frozenset({STOP})
)


@pytest.mark.parametrize(
    ("output_token_ids", "finish"),
    [
        ([], None),
        ([1, 2], None),
        ([1, EOS], Finish(FinishReason.STOP)),
        ([1, STOP], Finish(FinishReason.STOP, stop_token_id=STOP)),
        ([1, 2, 3], Finish(FinishReason.LENGTH)),
        ([1, 2, EOS], Finish(FinishReason.STOP)),
        ([1, 2, STOP], Finish(FinishReason.STOP, stop_token_id=STOP)),
    ],
)
def test_the_newest_token_decides(output_token_ids: list[int], finish: Finish | None) -> None:
    request = Request("a", [7, 8, *output_token_ids], 2, SAMPLING)
    assert request.finish_by_rules() == finish


def test_an_eos_or_stop_token_in_the_prompt_ends_nothing() -> None:
    assert Request("a", [STOP, EOS], 2, SAMPLING).finish_by_rules() is None


def test_a_token_that_is_both_eos_and_a_stop_token_counts_as_eos() -> None:
    sampling = SamplingParameters(
        max_tokens=3, eos_token_ids=frozenset({EOS}), stop_token_ids=frozenset({EOS})
    )
    assert Request("a", [7, EOS], 1, sampling).finish_by_rules() == Finish(FinishReason.STOP)


def test_a_token_that_completes_the_grammar_stops_even_at_the_length() -> None:
    request = Request("a", [7, 1, 2, 3], 1, SAMPLING)
    assert request.finish_by_rules(completes=True) == Finish(FinishReason.STOP)


def test_higher_priority_goes_first_then_the_earlier_arrival() -> None:
    requests = [Request(index, [1], 1, SAMPLING, priority) for index, priority in enumerate([0, 2])]
    requests.append(Request(2, [1], 1, SAMPLING, 2))
    for index, request in enumerate(requests):
        request.arrival = index
    assert [request.key for request in sorted(requests, key=lambda r: r.order)] == [1, 2, 0]
