"""The JSON of a chat: what is no chat is refused with the field at fault."""

import json

import pytest

from tokenizer_svc.chat_json import private_use_in, read_chat
from tokenizer_svc.chat_refused import ChatRefused

USER = b'[{"role": "user", "content": "Hi"}]'


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (b"", "messages is not valid JSON"),
        (b"[", "messages is not valid JSON"),
        (b"\xff\xfe", "messages is not valid JSON"),
        (b'[{"role": "user", "content": NaN}]', "messages is not valid JSON"),
        (b"{}", "messages must be a list"),
        (b"[]", "at least one message"),
        (b'["Hi"]', r"messages\[0\] must be an object"),
        (USER[:-1] + b', {"role": "wizard", "content": "x"}]', r"messages\[1\].role"),
        (b'[{"content": "x"}]', r"messages\[0\].role"),
        (b'[{"role": ["user"], "content": "x"}]', r"messages\[0\].role"),
        (b'[{"role": "user", "content": 7}]', r"messages\[0\].content must be"),
        (b'[{"role": "user", "content": {"text": "x"}}]', r"messages\[0\].content must be"),
        (
            b'[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]',
            r"messages\[0\].content\[0\]",
        ),
        (b'[{"role": "user", "content": [{"type": "text"}]}]', r"messages\[0\].content\[0\]"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bug_30_bad_messages_are_refused(messages: bytes, said: str) -> None:
    with pytest.raises(ChatRefused, match=said) as caught:
        read_chat(messages)
    assert caught.value.param == "messages"


def test_the_other_fields_are_named() -> None:
    for tools in (b"{", b"{}", b'"x"'):
        with pytest.raises(ChatRefused) as caught:
            read_chat(USER, tools)
        assert caught.value.param == "tools"
    for variables in (b"{", b"[]", b'{"messages": []}', b'{"tools": 1}'):
        with pytest.raises(ChatRefused) as caught:
            read_chat(USER, b"", variables)
        assert caught.value.param == "chat_template_kwargs"


def test_empty_tools_are_no_tools() -> None:
    assert read_chat(USER, b"[]").tools is None
    assert read_chat(USER, b"null").tools is None
    assert read_chat(USER, b'[{"type": "function"}]').tools == [{"type": "function"}]


@pytest.mark.parametrize(
    "raw", [rb'["\ud800"]', rb'[{"\udc00x": 1}]', rb'[{"a": ["ok", "x\ud83d"]}]']
)
def test_half_a_surrogate_pair_is_refused(raw: bytes) -> None:
    with pytest.raises(ChatRefused, match="surrogate") as caught:
        private_use_in(json.loads(raw), "messages")
    assert caught.value.param == "messages"


def test_whole_pairs_are_characters_and_private_use_is_found() -> None:
    assert private_use_in(json.loads(rb'["\ud83e\udd9c", {"\ue005": "\uf8ff"}]'), "m") == {
        "\ue005",
        "\uf8ff",
    }


@pytest.mark.parametrize("depth", [103, 300, 900, 100_000])
def test_what_is_nested_too_deeply_is_refused_with_its_field(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    fields = {
        "messages": (b'[{"role": "user", "content": "Hi", "x": ' + deep + b"}]",),
        "tools": (USER, deep),
        "chat_template_kwargs": (USER, b"", b'{"x": ' + deep + b"}"),
    }
    for param, raw in fields.items():
        with pytest.raises(ChatRefused, match="nested too deeply") as caught:
            read_chat(*raw)
        assert caught.value.param == param


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert len(read_chat(b"[" + b",".join([USER[1:-1]] * 300) + b"]").messages) == 300
