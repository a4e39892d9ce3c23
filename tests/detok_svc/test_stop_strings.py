"""The search for stop strings equals a plain search on the whole text, however it is split."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from detok_svc.stop_strings import StopAutomata, StopAutomaton, StopStrings


def plain_search(text: str, stops: list[str], ends_after: int = 0) -> tuple[int, str] | None:
    """Start and stop string of the match that ends earliest and, of those, starts earliest."""
    for end in range(ends_after + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return end - len(longest), longest
    return None


def longest_held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(borders)]


texts = st.text("ab[]\n🦜", max_size=24)
stop_lists = st.lists(st.text("ab[]\n🦜", min_size=1, max_size=5), min_size=1, max_size=4)


@given(texts, stop_lists, st.lists(st.integers(0, 24), max_size=8), st.integers(0, 3))
@settings(deadline=None, max_examples=500)
@example("xaabab", ["abab", "ba"], [1, 2, 3, 4, 5], 0)
@example("aab", ["aab", "ab", "b"], [2], 0)
@example("abab", ["ab", "bab"], [2], 1)
def test_search_in_pieces_equals_plain_search_and_holds_the_least(
    text: str, stops: list[str], cuts: list[int], num_pieces_without_end: int
) -> None:
    search = StopStrings(StopAutomaton(stops))
    released, taken = "", ""
    pieces = pieces_of(text, cuts)
    expected = plain_search(text, stops, len("".join(pieces[:num_pieces_without_end])))
    for index, piece in enumerate(pieces):
        taken += piece
        new, stop = search.push(piece, may_end=index >= num_pieces_without_end)
        released += new
        if stop:
            assert expected == (len(released), stop)
            assert released == text[: len(released)]
            return
        assert search.num_held == longest_held(taken, stops)
        assert released == taken[: len(taken) - search.num_held]
    assert expected is None
    assert released + search.flush() == text


def test_text_that_cannot_begin_a_match_is_released_at_once() -> None:
    search = StopStrings(StopAutomaton(["wx yz"]))
    assert search.push("uv w") == ("uv ", "")
    assert search.push("w") == ("w", "")
    assert search.push("x y!") == ("wx y!", "")
    assert search.num_held == 0


def test_automata_are_shared_by_equal_stop_lists_and_long_ones_are_not_kept() -> None:
    automata = StopAutomata(max_entries=2)
    kept = automata.automaton(("a", "b"))
    assert automata.automaton(("a", "b")) is kept
    for stop in "cd":
        automata.automaton((stop,))
    assert automata.automaton(("a", "b")) is not kept
    long = ("x" * 2_000,)
    assert automata.automaton(long) is not automata.automaton(long)


@pytest.mark.parametrize("stop", ["^", "]", "\\", "-", "^]-\\", ".", "\n"])
def test_characters_with_a_meaning_in_patterns_are_plain(stop: str) -> None:
    assert StopStrings(StopAutomaton([stop])).push(f"ab{stop}c") == ("ab", stop)
