"""Tool calls in text: each format, what is no call, and that pieces of any size change nothing."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat_events import CallArguments, CallStart, ChatEvent, ContentPiece, joined_events
from gateway.tool_call_format import HERMES, LLAMA3_JSON, MISTRAL, CallFormat
from gateway.tool_call_parser import MAX_HEAD_CHARACTERS, ToolCallParser

NAMES = frozenset({"search", "g"})
FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL}


def parse(form: CallFormat, pieces: Sequence[str], **options: Any) -> list[ChatEvent]:
    parser = ToolCallParser(form, NAMES, "key", **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined_events(events + parser.end())


def result(events: Sequence[ChatEvent]) -> tuple[str, list[tuple[str, str]]]:
    """The joined content, and each call's name and arguments."""
    content = "".join(event.text for event in events if isinstance(event, ContentPiece))
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    return content, list(zip(names, arguments, strict=True))


def call(form: CallFormat, name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "{form.arguments_key}": {arguments}}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "", [("g", "{}")]),
        (
            HERMES,
            "Let me see.\n\n"
            '<tool_call>{"name":"g","arguments":{"a": [1, {"b": "}"}]}}</tool_call>\n'
            '<tool_call>{"arguments":{"q":"\\"<"},"name":"search"}</tool_call>\n',
            "Let me see.",
            [("g", '{"a": [1, {"b": "}"}]}'), ("search", '{"q":"\\"<"}')],
        ),
        (
            HERMES,
            '<tool_call>{"name":"g","arguments":{}}</tool_call> Done.',
            " Done.",
            [("g", "{}")],
        ),
        (HERMES, '<tool_call>{"name":"g"}</tool_call>', "", [("g", "{}")]),
        (HERMES, '<tool_call>{"id":7,"name":"g","arguments":{},"x":[1]}', "", [("g", "{}")]),
        (HERMES, '<tool_call>{"name":"g","arguments":{}\n</tool_call>', "", [("g", "{}")]),
        (HERMES, '<tool_call>{"name":"g","arguments":{}}}</tool_call>', "", [("g", "{}")]),
        (LLAMA3_JSON, '{"name": "g", "parameters": {"a": 1}}', "", [("g", '{"a": 1}')]),
        (
            LLAMA3_JSON,
            '<|python_tag|>{"name":"g","parameters":{}}; {"name":"search","parameters":{"q":1}}',
            "",
            [("g", "{}"), ("search", '{"q":1}')],
        ),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "g", "arguments": {}, "id": "a"}, '
            '{"name": "search", "arguments": {"q": "]"}}]',
            "",
            [("g", "{}"), ("search", '{"q": "]"}')],
        ),
        (MISTRAL, 'Now. [TOOL_CALLS]{"name":"g","arguments":{}}', "Now.", [("g", "{}")]),
    ],
)
def test_calls_are_found(
    form: CallFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert result(parse(form, [text])) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, ""),
        (HERMES, "  a < b <tool_calling> \n"),
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>{"name": "sea'),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "g", "arguments": "text"}</tool_call>'),
        (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{name: "g"}</tool_call> and so on'),
        (HERMES, '{"name": "g", "arguments": {}}'),
        (LLAMA3_JSON, '{"title": "g", "parameters": {}}'),
        (LLAMA3_JSON, 'I call {"name": "g", "parameters": {}}'),
        (LLAMA3_JSON, '<|python_tag|>search.call(query="x")'),
        (MISTRAL, "[TOOL_CALLS] [1, 2]"),
        (MISTRAL, "[TOOL"),
        (HERMES, '<tool_call>{"x": "' + "a" * MAX_HEAD_CHARACTERS + '", "name": "g"}</tool_call>'),
    ],
)
def test_what_is_no_call_stays_text_to_the_letter(form: CallFormat, text: str) -> None:
    assert result(parse(form, [text])) == (text, [])
    assert result(parse(form, list(text))) == (text, [])


def test_a_call_within_what_is_no_call_is_found() -> None:
    text = '<tool_call> hm <tool_call>{"name":"g","arguments":{}}</tool_call>'
    assert result(parse(HERMES, [text])) == ("<tool_call> hm", [("g", "{}")])


def test_text_after_a_call_that_does_not_close_it_is_kept() -> None:
    text = '[TOOL_CALLS][{"name":"g","arguments":{}}, {"nam": 1}] end'
    assert result(parse(MISTRAL, [text])) == (', {"nam": 1}] end', [("g", "{}")])


def test_arguments_that_are_cut_short_are_told_as_far_as_they_came() -> None:
    text = '<tool_call>{"name":"g","arguments":{"a": "b'
    assert result(parse(HERMES, [text])) == ("", [("g", '{"a": "b')])


def test_arguments_stream_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES, "key")
    assert parser.feed('<tool_call>{"name":"g","argu') == []
    start, begun = parser.feed('ments":{"a"')
    assert isinstance(start, CallStart)
    assert start.call_id.startswith("call_")
    assert begun == CallArguments(0, '{"a"')
    assert parser.feed(":1") == [CallArguments(0, ":1")]


def test_calls_over_the_maximum_are_left_out() -> None:
    one = '<tool_call>{"name":"g","arguments":{}}</tool_call>'
    assert result(parse(HERMES, [one * 3], max_calls=1)) == ("", [("g", "{}")])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_calls_may_begin_bare_where_that_is_said(form: CallFormat) -> None:
    text = call(form, "g", '{"a": 1}')
    if form.bracket:
        text = f"[{text}]"
    assert result(parse(form, [text], begins_bare=True)) == ("", [("g", '{"a": 1}')])
    closed = f"{form.opener}{text}{form.closer if not form.bracket else ''}"
    assert result(parse(form, [closed], begins_bare=True)) == ("", [("g", '{"a": 1}')])


def test_ids_differ() -> None:
    one = '<tool_call>{"name":"g","arguments":{}}</tool_call>'
    events = parse(HERMES, [one * 20])
    assert len({event.call_id for event in events if isinstance(event, CallStart)}) == 20


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3)


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[CallFormat, str, list[tuple[str, str]]]:
    """Calls as a model of some format writes them."""
    form = draw(st.sampled_from(list(FORMATS.values())))
    indent, blanks = draw(st.sampled_from([None, 2])), draw(st.sampled_from(["", " ", "\n"]))
    made = [
        (name, json.dumps(values, indent=indent, ensure_ascii=draw(st.booleans())))
        for name, values in draw(calls)
    ]
    texts = [blanks + call(form, name, text) + blanks for name, text in made]
    if form.separator:
        text = form.opener + blanks + form.bracket + form.separator.join(texts) + form.closer
    else:
        text = blanks.join(form.opener + text + form.closer for text in texts)
    return form, text, made


# Made of what parsers look at, so that nearly-calls are common.
_SCRAPS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[",
        "]",
        ";",
        ",",
        "{",
        "}",
    ),
    *(
        '"name"',
        '"arguments"',
        '"parameters"',
        ":",
        '"g"',
        '"',
        "\\",
        " ",
        "\n",
        "1",
        "text",
        "<to",
    ),
    *('{"name":"g","arguments":{', '{"name": "search", "parameters": {"q": "x"}}', "}}", "é🦜"),
]
scraps = st.lists(st.sampled_from(_SCRAPS), max_size=24).map("".join)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def without_ids(events: Sequence[ChatEvent]) -> list[ChatEvent]:
    return [CallStart(e.index, "", e.name) if isinstance(e, CallStart) else e for e in events]


@given(written_calls(), st.data())
def test_calls_are_found_in_every_chunking(
    written: tuple[CallFormat, str, list[tuple[str, str]]], data: st.DataObject
) -> None:
    form, text, made = written
    for pieces in ([text], list(text), cut(data.draw, text)):
        assert result(parse(form, pieces)) == ("", made)


@given(st.sampled_from(list(FORMATS.values())), scraps, st.booleans(), st.data())
def test_events_do_not_depend_on_the_chunking(
    form: CallFormat, text: str, bare: bool, data: st.DataObject
) -> None:
    whole = without_ids(parse(form, [text], begins_bare=bare))
    assert without_ids(parse(form, list(text), begins_bare=bare)) == whole
    assert without_ids(parse(form, cut(data.draw, text), begins_bare=bare)) == whole


@given(st.sampled_from(list(FORMATS.values())), scraps)
def test_no_text_is_lost_where_there_is_no_call(form: CallFormat, text: str) -> None:
    content, found = result(parse(form, [text]))
    if not found:
        assert content == text
    else:
        for _, written in found:
            assert written == "{}" or written in text
