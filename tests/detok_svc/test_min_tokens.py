"""Stop strings are ignored until min_tokens tokens were sampled."""

import pytest

from protos.common.v1 import common_pb2
from tests.fakes.detok_line import new_submit, run_in_process, token_bytes
from tests.fakes.engine_script import Script, one_per_step
from tests.fakes.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
BL = token_bytes(TOKENIZER)
STOP = common_pb2.FINISH_REASON_STOP


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "x"), (2, "x"), (3, "xaby"), (5, "xaby"), (6, "xabyabz")]
)
def test_a_stop_string_counts_where_it_ends_after_min_tokens(min_tokens: int, text: str) -> None:
    submit = new_submit(stop=["ab"], min_tokens=min_tokens)
    for script in (one_per_step(ids("xabyabz")), Script([ids("xabyabz")])):
        answer = run_in_process(submit, script, BL)
        assert answer.text == text
        assert answer.finish.reason == STOP
        assert answer.finish.stop_string == ("ab" if min_tokens < 6 else "")


def test_a_stop_string_that_begins_before_and_ends_after_counts() -> None:
    answer = run_in_process(new_submit(stop=["ab"], min_tokens=2), one_per_step(ids("xab")), BL)
    assert (answer.text, answer.finish.stop_string) == ("x", "ab")


def test_an_ignored_stop_string_is_not_held_back() -> None:
    answer = run_in_process(new_submit(stop=["ab"], min_tokens=9), one_per_step(ids("abac")), BL)
    # Only what may yet begin a match is: each "a".
    assert [delta for delta in answer.deltas if delta] == ["ab", "ac"]


def test_tokens_of_an_unfinished_character_count() -> None:
    # Four tokens make one character; the fifth and sixth the stop string.
    submit = new_submit(stop=["bb"], min_tokens=5)
    answer = run_in_process(submit, one_per_step(ids("\N{PARROT}bb")), BL)
    assert (answer.text, answer.finish.stop_string) == ("\N{PARROT}", "bb")
    submit = new_submit(stop=["bb"], min_tokens=6)
    assert run_in_process(submit, one_per_step(ids("\N{PARROT}bb")), BL).text == "\N{PARROT}bb"


def test_a_continued_sequence_ignores_the_same() -> None:
    for num_done in range(6):
        submit = new_submit(stop=["ab"], min_tokens=3, output=ids("xabyab")[:num_done])
        answer = run_in_process(submit, one_per_step(ids("xabyabz")), BL)
        assert "xaby".endswith(answer.text)
        assert answer.finish.stop_string == "ab"
