"""Thoughts told from the answer, in every chunking."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat_events import ContentPiece, ReasoningPiece
from gateway.chat_reducer import ChatReducer, TextReading

READING = TextReading(has_reasoning=True)


def read(pieces: Sequence[str], in_reasoning: bool = False) -> tuple[str, str]:
    reducer = ChatReducer(READING, "key", in_reasoning=in_reasoning)
    events = [event for piece in pieces for event in reducer.feed(piece)] + reducer.end()
    thoughts = "".join(event.text for event in events if isinstance(event, ReasoningPiece))
    return thoughts, "".join(event.text for event in events if isinstance(event, ContentPiece))


@pytest.mark.parametrize(
    ("text", "in_reasoning", "expected"),
    [
        ("<think>\nhm,\nwell\n</think>\n\nYes. ", False, ("hm,\nwell", "Yes. ")),
        ("\n<think>hm</think>Yes", False, ("hm", "Yes")),
        ("hm\n</think>\n\nYes", True, ("hm", "Yes")),
        ("<think>hm</think>Yes", True, ("hm", "Yes")),
        ("<think>\n\n</think>\n\nYes", False, ("", "Yes")),
        ("<think>cut sho", False, ("cut sho", "")),
        ("cut short </thi", True, ("cut short </thi", "")),
        (" Yes. ", False, ("", " Yes. ")),
        ("Yes <think>no</think>", False, ("", "Yes <think>no</think>")),
        ("<thin", False, ("", "<thin")),
        ("", True, ("", "")),
    ],
)
def test_thoughts_and_answer(text: str, in_reasoning: bool, expected: tuple[str, str]) -> None:
    assert read([text], in_reasoning) == expected
    assert read(list(text), in_reasoning) == expected


def test_thoughts_stream_as_they_come() -> None:
    reducer = ChatReducer(READING, "key")
    assert reducer.feed("<think>\nhm") == [ReasoningPiece("hm")]
    assert reducer.feed(", so </th") == [ReasoningPiece(", so")]
    assert reducer.feed("ink>\n") == []
    assert reducer.feed("Yes") == [ContentPiece("Yes")]


scraps = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "</", " ", "\n", "a", "ink>", "é"]), max_size=16
).map("".join)


@given(scraps, st.booleans(), st.data())
def test_thoughts_do_not_depend_on_the_chunking(
    text: str, in_reasoning: bool, data: st.DataObject
) -> None:
    whole = read([text], in_reasoning)
    assert read(list(text), in_reasoning) == whole
    place = data.draw(st.integers(0, len(text)))
    assert read([text[:place], text[place:]], in_reasoning) == whole


@given(scraps)
def test_text_without_thoughts_is_untouched(text: str) -> None:
    if not text.strip().startswith("<think>"):
        assert read([text]) == ("", text)
