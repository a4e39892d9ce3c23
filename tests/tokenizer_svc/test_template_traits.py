"""What templates take is found by trying, and messages are put into that form."""

from typing import Any

import pytest

from tests.tokenizer_svc.conftest import FAMILIES
from tokenizer_svc.chat_messages import suited_messages
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.control_texts import ControlTexts
from tokenizer_svc.template_traits import TemplateTraits, template_traits

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}"
PARTS_ONLY = (
    "{% for m in messages %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
)
OBJECT_ARGUMENTS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
REFUSES_ALL = "{{ raise_exception('no') }}"
KNOWS_DEVELOPER = (
    "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.content }}{% endfor %}"
)

LISTS_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
NEEDS_TOOLS = "{{ tools | length }}{% for m in messages if tools %}{{ m.content }}{% endfor %}"


def traits_of(source: str, control: tuple[str, ...] = ("<|end|>", "<|end|>x")) -> TemplateTraits:
    return template_traits(source, ChatTemplate(source, {}, 10_000), ControlTexts(control))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, TemplateTraits(turn_end="<|end|>")),
        (PARTS_ONLY, TemplateTraits(takes_parts=True, takes_text=False, turn_end="<|end|>")),
        (OBJECT_ARGUMENTS, TemplateTraits(takes_argument_text=False, takes_calls=True)),
        (REFUSES_ALL, TemplateTraits()),
        (LISTS_TOOLS, TemplateTraits(takes_tools=True)),
        (NEEDS_TOOLS, TemplateTraits(takes_tools=True)),
        (KNOWS_DEVELOPER, TemplateTraits(takes_developer=True)),
    ],
)
def test_traits_of_small_templates(source: str, expected: TemplateTraits) -> None:
    assert traits_of(source) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2", TemplateTraits(turn_end="<|im_end|>")),
        ("llama3_1", TemplateTraits(turn_end="<|eot_id|>")),
        ("qwen3", TemplateTraits(takes_tools=True, takes_calls=True, turn_end="<|im_end|>")),
        ("gemma3", TemplateTraits(takes_parts=True, turn_end="<end_of_turn>")),
        (
            "deepseek_v3",
            TemplateTraits(
                takes_null_content=True,
                takes_calls=True,
                turn_end="<\uff5cend▁of▁sentence\uff5c>",
            ),
        ),
    ],
)
def test_traits_of_real_templates(name: str, expected: TemplateTraits) -> None:
    [family] = [family for family in FAMILIES if family.name == name]
    template = ChatTemplate(family.template, family.special_tokens, 100_000)
    assert template_traits(family.template, template, ControlTexts(family.control)) == expected


def suited(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    [result] = suited_messages([message], traits)
    return result


def test_text_parts_are_joined_by_a_newline_unless_the_template_takes_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert suited(message, TemplateTraits())["content"] == "a\nb"
    assert suited(message, TemplateTraits(takes_parts=True))["content"] == parts
    assert message == {"role": "user", "content": parts}


def test_text_becomes_a_part_for_a_template_of_parts() -> None:
    only_parts = TemplateTraits(takes_parts=True, takes_text=False)
    expected = [{"type": "text", "text": "a"}]
    assert suited({"role": "user", "content": "a"}, only_parts)["content"] == expected


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert suited(message, TemplateTraits())["role"] == "system"
    assert suited(message, TemplateTraits(takes_developer=True))["role"] == "developer"


def test_missing_content_is_empty_but_null_beside_calls_where_that_is_taken() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert suited(calls, TemplateTraits())["content"] == ""
    assert suited(calls, TemplateTraits(takes_null_content=True))["content"] is None
    silent = {"role": "assistant"}
    assert suited(silent, TemplateTraits(takes_null_content=True))["content"] == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": "<s>"}', {"a": "<s>"}),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_are_parsed_for_a_template_that_writes_json(
    arguments: Any, expected: Any
) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call, "odd"]}
    done = suited(message, TemplateTraits(takes_argument_text=False))
    assert done["tool_calls"] == [{"function": {"name": "f", "arguments": expected}}, "odd"]
    assert suited(message, TemplateTraits())["tool_calls"] == [call, "odd"]
