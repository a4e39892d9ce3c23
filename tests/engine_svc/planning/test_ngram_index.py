"""Where a sequence's latest tokens stood before."""

from hypothesis import given
from hypothesis import strategies as st

from engine_svc.planning.ngram_index import NgramIndex


def test_four_tokens_count_for_more_than_two_and_later_ones_for_more_than_earlier_ones() -> None:
    assert NgramIndex().find([1, 2, 3, 4, 9, 3, 4, 8, 1, 2, 3, 4]) == (4, 4)
    assert NgramIndex().find([1, 2, 3, 4, 9, 3, 4, 8, 7, 2, 3, 4]) == (7, 2)
    assert NgramIndex().find([1, 2, 9, 1, 2, 8, 1, 2]) == (5, 2)


def test_what_is_new_is_found_nowhere() -> None:
    assert NgramIndex().find([1, 2, 3, 4, 5]) == (0, 0)
    assert NgramIndex().find([1, 1, 1]) == (0, 0)
    # The last tokens are not where they stood before.
    assert NgramIndex().find([1, 2, 3, 4]) == (0, 0)


def test_a_token_that_repeats_at_once_is_found_one_back() -> None:
    assert NgramIndex().find([5, 5, 5, 5, 5]) == (4, 4)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.data())
def test_it_finds_the_same_however_the_sequence_grew(
    token_ids: list[int], data: st.DataObject
) -> None:
    index, grown = NgramIndex(), token_ids[:4]
    while len(grown) < len(token_ids):
        if data.draw(st.booleans()):
            index.find(grown)
        grown.append(token_ids[len(grown)])
    end, size = index.find(grown)
    assert (end, size) == NgramIndex().find(token_ids)
    if size:
        assert token_ids[end - size : end] == token_ids[-size:]
        later = range(end + 1, len(token_ids))
        assert all(token_ids[e - size : e] != token_ids[-size:] for e in later)
