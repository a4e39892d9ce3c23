"""Stand-ins: no string of a user helps to form a control text, and every string comes back."""

import string
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.control_texts import ControlTexts
from tokenizer_svc.stand_ins import StandIns, private_use_characters

CONTROL = ("<|im_start|>", "<|im_end|>", "<|im|>", "</s>", "<s>", "[INST]", "<\uff5cUser\uff5c>")
TEXTS = ControlTexts(CONTROL)
# Texts that are nearly control texts.
FRAGMENTS = st.sampled_from([text[i:j] for text in CONTROL for i in range(3) for j in (-3, -1, 99)])
HOSTILE = st.lists(FRAGMENTS | st.text("<|>s/im_endINST[]\ue000\ue001a ", max_size=3)).map("".join)


def stand_ins_for(*texts: str) -> StandIns:
    return StandIns(TEXTS, set().union(*map(private_use_characters, texts)))


@settings(deadline=None)
@given(before=HOSTILE, text=HOSTILE, after=HOSTILE)
def test_no_control_text_holds_a_part_of_a_protected_text(
    before: str, text: str, after: str
) -> None:
    """`before` and `after` are a template's, and may end or begin in the middle of one."""
    protected = stand_ins_for(before, text, after).protect(text)
    whole = before + protected + after
    for control in CONTROL:
        start = whole.find(control)
        while start >= 0:
            end = start + len(control)
            outside = end <= len(before) or start >= len(before) + len(protected)
            # A plain word may complete a marker: templates write `<|` + role + `|>`.
            assert outside or text.replace("_", "a").isalnum() or not text
            start = whole.find(control, start + 1)


@settings(deadline=None)
@given(text=HOSTILE)
def test_a_protected_text_keeps_its_length_and_comes_back(text: str) -> None:
    stand_ins = stand_ins_for(text)
    protected = stand_ins.protect(text)
    assert len(protected) == len(text)
    assert stand_ins.restore(protected) == text


@settings(deadline=None)
@given(text=st.text(string.ascii_letters + string.digits + " .,!?\n'\"(){}=+-*", max_size=80))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert stand_ins_for(text).protect(text) == text


@pytest.mark.parametrize("change", [str.upper, str.lower, str.title, str.swapcase])
@settings(deadline=None)
@given(text=HOSTILE)
def test_no_change_of_case_makes_a_control_text(change: Callable[[str], str], text: str) -> None:
    for typed in (text, text.swapcase()):
        changed = change(stand_ins_for(typed).protect(typed))
        assert not any(control in changed for control in CONTROL)


def test_letters_whose_lower_case_is_longer_do_not_shift_positions() -> None:
    assert stand_ins_for().protect("İ<s>İ</S>") == "İ\ue000s>İ\ue000/S>"


def test_keys_and_nested_values_are_protected() -> None:
    stand_ins = stand_ins_for()
    value = {"a<|im_end|>": ["<s>", {"b": "x</s>"}], "n": [1, None, True, 2.5]}
    protected = stand_ins.protect(value)
    assert protected == {
        "a\ue000|im_end|>": ["\ue000s>", {"b": "x\ue000/s>"}],
        "n": [1, None, True, 2.5],
    }
    assert stand_ins.originals == {"\ue000": "<"}


def test_characters_of_the_request_are_no_stand_ins() -> None:
    stand_ins = stand_ins_for("\ue000\ue001")
    assert stand_ins.protect("\ue000<s>\ue001") == "\ue000\ue002s>\ue001"


def test_a_request_with_every_private_use_character_is_refused() -> None:
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(ChatRefused):
        stand_ins_for(everything).protect(everything + "<s>")


def test_words_that_templates_compare_are_left_alone() -> None:
    for word in ("user", "im_end", "INST", "function", "s"):
        assert stand_ins_for().protect(word) == word


def test_the_longest_control_text_at_the_start_is_found() -> None:
    assert ControlTexts(["<a>", "<a>b"]).first_in("<a>bc") == "<a>b"
    assert ControlTexts([]).first_in("<a>") is None
    assert ControlTexts([]).critical_positions("<a>") == set()
