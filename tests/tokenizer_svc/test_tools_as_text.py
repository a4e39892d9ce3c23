"""A template that knows no tools, such as SmolLM2's, is given them as text."""

import json
from typing import Any

from tests.tokenizer_svc.conftest import FAMILIES
from tokenizer_svc.prompt_renderer import PromptRenderer
from tokenizer_svc.tools_as_text import with_calls, with_tools

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


def rendered(name: str, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    [family] = [family for family in FAMILIES if family.name == name]
    renderer = PromptRenderer(
        {"default": family.template}, family.special_tokens, family.control, 100_000
    )
    tools_json = json.dumps(tools).encode() if tools else b""
    return renderer.render(json.dumps(messages).encode(), tools_json).text


CONVERSATION = [
    {"role": "user", "content": "Rain in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [call('{"city": "Rome"}'), call("?")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "wet"}]},
]


def test_smollm2_sees_tools_calls_and_results() -> None:
    text = rendered("smollm2", CONVERSATION, [TOOL])
    assert text.count("<|im_start|>system\n") == 1
    assert json.dumps(TOOL) in text
    assert text.endswith(
        "<|im_start|>user\nRain in Rome?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": "?"}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\ndry\n</tool_response>\n"
        "<tool_response>\nwet\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_tools_nothing_is_described_but_a_history_of_calls_stays() -> None:
    text = rendered("smollm2", CONVERSATION)
    assert "<tools>" not in text and "<tool_call>" in text and "<tool_response>" in text


def test_gemma_takes_results_as_the_users_turns() -> None:
    text = rendered("gemma3", CONVERSATION, [TOOL])
    assert json.dumps(TOOL) in text and "<start_of_turn>user\n<tool_response>" in text


def test_a_template_that_knows_tools_is_left_to_itself() -> None:
    text = rendered("qwen3", CONVERSATION, [TOOL])
    assert text.count(json.dumps(TOOL)) == 1 and text.count("# Tools") == 1


def test_a_template_that_knows_calls_but_no_tools_writes_calls_itself_unless_tools_are_given() -> (
    None
):
    assert "<tool_call>" not in rendered("deepseek_v3", CONVERSATION)
    assert "<tool_call>" in rendered("deepseek_v3", CONVERSATION, [TOOL])


def test_a_system_message_is_extended() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    first, second = with_tools(messages, [TOOL])
    assert first["role"] == "system" and first["content"].startswith("Be kind.\n\nYou can call")
    assert second == messages[1]
    [added, *rest] = with_tools(messages[1:], [TOOL])
    assert added["role"] == "system" and rest == messages[1:]


def test_text_beside_calls_is_kept_and_odd_calls_are_shown_as_they_are() -> None:
    message = {"role": "assistant", "content": "So:", "tool_calls": ["odd"]}
    assert with_calls([message]) == [
        {"role": "assistant", "content": 'So:\n<tool_call>\n"odd"\n</tool_call>'}
    ]
