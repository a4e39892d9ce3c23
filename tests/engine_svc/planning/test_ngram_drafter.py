"""What is drafted, and when nothing is because it would not pay."""

from collections.abc import Callable

import pytest

from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.ngram_drafter import NgramDrafter, drafter_for
from engine_svc.planning.request import Request
from engine_svc.planning.step import Grammar, GrammarForm, SamplingParameters

TEXT = list(range(100, 200))


def request_of(
    token_ids: list[int], max_tokens: int = 100, grammar: Grammar | None = None
) -> Request:
    sampling = SamplingParameters(max_tokens=max_tokens, grammar=grammar)
    return Request("key", token_ids, len(token_ids), sampling)


def quoting(max_tokens: int = 100) -> Request:
    return request_of([*TEXT, 1, 2, *TEXT[10:14]], max_tokens)


def drafter_with(seconds_of: Callable[[int], float]) -> NgramDrafter:
    drafter = NgramDrafter(8)
    for _ in range(20):
        for num_tokens in (1, 2, 3, 5, 9, 16, 24, 32):
            drafter.observe(num_tokens, seconds_of(num_tokens))
    return drafter


def cheap(num_tokens: int) -> float:
    """As where a step's time is spent on reading weights."""
    return 0.020 + 0.0002 * num_tokens


def dear(num_tokens: int) -> float:
    return 0.001 * num_tokens


def test_a_quotation_is_drafted_on() -> None:
    (draft,) = drafter_with(cheap).draft([request_of([1, 2, 3, 4, 5]), quoting()], 64)
    assert draft.place == 1
    assert draft.token_ids == TEXT[14 : 14 + len(draft.token_ids)]


def test_nothing_is_drafted_before_a_step_was_timed() -> None:
    assert NgramDrafter(8).draft([quoting()], 64) == []


def test_nothing_is_drafted_where_every_token_costs_as_much_as_a_step() -> None:
    assert drafter_with(dear).draft([quoting()], 64) == []


@pytest.mark.parametrize("limit", [-1, 0, 1, 5])
def test_a_limit_is_kept_over_all_requests(limit: int) -> None:
    drafts = drafter_with(cheap).draft([quoting(), quoting(), quoting()], limit)
    assert sum(len(draft.token_ids) for draft in drafts) == max(0, limit)


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
def test_the_last_possible_token_is_never_drafted(max_tokens: int) -> None:
    drafts = drafter_with(cheap).draft([quoting(max_tokens)], 64)
    assert sum(len(draft.token_ids) for draft in drafts) == max_tokens - 1


def test_a_request_with_a_grammar_is_left_alone() -> None:
    grammar = Grammar(GrammarForm.REGEX, ".*")
    request = request_of(quoting().token_ids, grammar=grammar)
    assert drafter_with(cheap).draft([request], 64) == []


def test_drafts_of_a_request_that_never_repeats_what_it_seems_to_stop_and_come_back() -> None:
    drafter = drafter_with(cheap)
    request = request_of(TEXT, max_tokens=1000)
    num_drafted = []
    for number in range(60):
        request.token_ids += [1000 + number, *TEXT[number : number + 2]]
        drafts = drafter.draft([request], 64)
        num_drafted.append(sum(len(draft.token_ids) for draft in drafts))
    assert num_drafted[0] > 0
    assert not any(num_drafted[30:])
    lengths = []
    for token_id in TEXT[:40]:
        request.token_ids.append(token_id)
        lengths += [len(draft.token_ids) for draft in drafter.draft([request], 64)]
    assert lengths[-1] == 8


def test_times_that_speak_against_drafts_are_put_to_the_test_now_and_then() -> None:
    drafter = drafter_with(dear)
    num_drafts = sum(bool(drafter.draft([quoting()], 64)) for _ in range(1000))
    assert 1 <= num_drafts <= 5


def test_speculation_can_be_off() -> None:
    limits = SchedulerConfig(1, 1, 10, 1, 10, 1)
    assert drafter_for(limits) is None
