"""The notation of tool calls is read off a template's text."""

import pytest

from tests.tokenizer_svc.conftest import FAMILIES
from tokenizer_svc.prompt_renderer import PromptRenderer
from tokenizer_svc.tool_call_format import tool_call_format


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("…within <tool_call></tool_call> XML tags", "HERMES"),
        ("{{- '[TOOL_CALLS][' }}", "MISTRAL"),
        ("{{- '<|python_tag|>' + call.name }}", "LLAMA3_JSON"),
        ('in the format {"name": function name, "parameters": dictionary}', "LLAMA3_JSON"),
        ("<tool_call>\n<function=example>", ""),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' }}", ""),
        ("{{ tools | tojson }}", ""),
    ],
)
def test_marks_in_a_template_that_takes_tools(source: str, expected: str) -> None:
    assert tool_call_format(source, takes_tools=True) == expected


def test_a_template_without_tools_gets_the_form_we_write() -> None:
    assert tool_call_format("anything", takes_tools=False) == "HERMES"


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_real_templates(name: str) -> None:
    [family] = [family for family in FAMILIES if family.name == name]
    renderer = PromptRenderer({"default": family.template}, {}, family.control, 100_000)
    assert renderer.tool_call_format == "HERMES"


def test_the_template_for_tools_decides() -> None:
    templates = {"default": "<tool_call>", "tool_use": "[TOOL_CALLS]{{ tools | tojson }}"}
    assert PromptRenderer(templates, {}, [], 1000).tool_call_format == "MISTRAL"
