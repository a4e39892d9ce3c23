"""`continue_final_message` ends a prompt where transformers ends it."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.tokenizer_svc.conftest import Family
from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.continued_message import with_marker
from tokenizer_svc.prompt_renderer import PromptRenderer


def render(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    renderer = PromptRenderer({"default": template}, {}, ["<|end|>"], 100_000)
    more = {"add_generation_prompt": False, "continue_final_message": True, **more}
    return renderer.render(json.dumps(messages).encode(), **more).text


@pytest.mark.parametrize(
    "content", ["The answer", "a ", " b\n\n", "x" * 50, "Hi", "é🦜", "<think>\nhm\n</think>\n\nso"]
)
def test_real_templates_end_as_in_transformers(family: Family, content: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    [expected], _ = render_jinja_template(
        [messages],
        chat_template=family.template,
        continue_final_message=True,
        **family.special_tokens,
    )
    renderer = PromptRenderer(
        {"default": family.template}, family.special_tokens, family.control, 100_000
    )
    prompt = renderer.render(json.dumps(messages).encode(), b"", b"", False, True)
    assert prompt.text == expected


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}"


def test_any_role_and_the_last_of_several_parts_can_be_continued() -> None:
    assert render(PLAIN, [{"role": "user", "content": "a "}]) == "<user>a "
    assert render(TRIMS, [{"role": "user", "content": " a "}]) == "<user>a"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(PLAIN, [{"role": "assistant", "content": parts}]) == "<assistant>a\nb"
    assert render(PLAIN, [{"role": "assistant", "content": ""}]) == "<assistant>"


def test_a_control_token_typed_at_the_end_stays_text() -> None:
    text = render(PLAIN, [{"role": "assistant", "content": "a<|end|>"}])
    assert "<|end|>" not in text and text.startswith("<assistant>a")


def test_what_a_template_does_not_show_cannot_be_continued() -> None:
    with pytest.raises(ChatRefused, match="does not show") as caught:
        render("no text", [{"role": "assistant", "content": "a"}])
    assert caught.value.param == "continue_final_message"


def test_a_message_without_text_cannot_be_continued() -> None:
    with pytest.raises(ChatRefused, match="no text") as caught:
        with_marker({"role": "assistant", "content": None}, "\ue000")
    assert caught.value.param == "continue_final_message"


def test_calls_that_the_template_does_not_know_are_text_which_can_go_on() -> None:
    assert render(PLAIN, [{"role": "assistant", "tool_calls": [{}]}]).endswith("</tool_call>")


def test_it_excludes_a_generation_prompt() -> None:
    with pytest.raises(ChatRefused, match="exclude each other"):
        render(PLAIN, [{"role": "user", "content": "a"}], add_generation_prompt=True)
