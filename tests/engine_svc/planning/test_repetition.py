"""What a request is expected to say next, and how surely."""

from engine_svc.planning.repetition import Certainty, Repetition

TEXT = list(range(100, 160))


def test_it_expects_what_followed_the_same_tokens_before() -> None:
    repetition = Repetition(Certainty())
    token_ids = [*TEXT, 1, 2, *TEXT[10:14]]
    assert repetition.follow(token_ids)
    assert repetition.expected(token_ids, 5) == TEXT[14:19]
    assert not Repetition(Certainty()).follow([*TEXT, 1, 2, 3, 4])


def test_it_stays_with_its_source_while_that_comes_true() -> None:
    repetition = Repetition(Certainty())
    token_ids = [*TEXT, 1, *TEXT[10:14]]
    for end in range(14, 30, 3):
        repetition.follow(token_ids)
        assert repetition.expected(token_ids, 3) == TEXT[end : end + 3]
        token_ids += TEXT[end : end + 3]
    token_ids += [7, 8]
    assert not repetition.follow(token_ids)


def test_what_repeats_its_own_end_is_expected_to_go_on() -> None:
    token_ids = [9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    repetition = Repetition(Certainty())
    assert repetition.follow(token_ids)
    assert repetition.expected(token_ids, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_chances_fall_and_are_better_the_more_tokens_agree() -> None:
    repetition = Repetition(Certainty())
    token_ids = [*TEXT, 1, 2, *TEXT[:2]]
    repetition.follow(token_ids)
    few = repetition.chances(8, 0.0)
    assert len(few) == 8
    assert sorted(few, reverse=True) == few
    assert len(set(few)) == 8
    token_ids += TEXT[2:30]
    repetition.follow(token_ids)
    assert all(
        after > before for after, before in zip(repetition.chances(8, 0.0), few, strict=True)
    )
    assert repetition.chances(8, 0.5) == [c for c in repetition.chances(8, 0.0) if c >= 0.5]


def test_it_learns_from_what_comes_without_drafting_it_and_teaches_others() -> None:
    shared = Certainty()
    before = shared.of(2)
    for number in range(20):
        repetition = Repetition(shared)
        token_ids = [*TEXT, number, *TEXT[5:7]]
        for token_id in (500, *TEXT[20:22], 501, *TEXT[30:32], 502):
            repetition.follow(token_ids)
            token_ids.append(token_id)
        repetition.follow(token_ids)
    assert shared.of(2) < before / 2
    repetition = Repetition(shared)
    repetition.follow([*TEXT, 1, *TEXT[5:7]])
    assert repetition.chances(1, 0.0) == [shared.of(2)]


def test_what_went_unseen_for_long_is_looked_up_anew() -> None:
    repetition = Repetition(Certainty())
    token_ids = [*TEXT, *TEXT[:4]]
    repetition.follow(token_ids)
    token_ids += [*range(200), *TEXT[40:44]]
    repetition.follow(token_ids)
    assert repetition.expected(token_ids, 2) == TEXT[44:46]
