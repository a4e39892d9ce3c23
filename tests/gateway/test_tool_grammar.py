"""Grammars of demanded calls: what they let a model write, and that the parser reads it."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.chat_choice import ChatChoice, ChatReader
from gateway.chat_reducer import TextReading
from gateway.tool_call_format import BARE_JSON, HERMES, LLAMA3_JSON, MISTRAL, CallFormat
from gateway.tool_grammar import embedded, tool_grammar
from gateway.tools import ToolFunction
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import InvalidRequest

REFERRING = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}},
    "required": ["a"],
    "$defs": {"A": {"type": "integer"}},
    "additionalProperties": False,
}
TOOLS = (ToolFunction("count", parameters=REFERRING), ToolFunction("clock"))
READING = {"tool_names": frozenset({"count", "clock"})}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def allows(tokenizer: LLTokenizer, grammar: common_pb2.Grammar, text: str) -> bool:
    """Whether the grammar allows all of `text`, and its end."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.grammar))
    assert not matcher.get_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


COUNT, CLOCK = ("count", '{"a": 7}'), ("clock", '{"zone": [1, "x"]}')


def written(form: CallFormat, *calls: tuple[str, str]) -> str:
    texts = [f'{{"name": "{name}", "{form.arguments_key}": {text}}}' for name, text in calls]
    if form is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return f"[{', '.join(texts)}]" if form is MISTRAL else "; ".join(texts)


def read(form: CallFormat, text: str) -> ChatChoice:
    reading = TextReading(call_format=form, begins_bare=bool(form.bracket), **READING)  # type: ignore[arg-type]
    choice = ChatChoice(ChatReader(reading, "key", in_reasoning=False))
    choice.add(detok_pb2.Output(text=text))
    choice.add(detok_pb2.Output(finish=common_pb2.Finish(reason=common_pb2.FINISH_REASON_STOP)))
    return choice


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON, MISTRAL, BARE_JSON])
def test_what_is_allowed_is_read_as_calls(tokenizer: LLTokenizer, form: CallFormat) -> None:
    for calls in ([COUNT], [CLOCK], [COUNT, CLOCK, COUNT]):
        text = written(form, *calls)
        assert allows(tokenizer, tool_grammar(form, TOOLS, None), text)
        choice = read(form, text)
        assert [(call.name, "".join(call.arguments)) for call in choice.calls] == calls
        assert choice.content is None and choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON, MISTRAL, BARE_JSON])
def test_what_is_no_call_is_not_allowed(tokenizer: LLTokenizer, form: CallFormat) -> None:
    one = tool_grammar(form, TOOLS, 1)
    assert allows(tokenizer, one, written(form, COUNT))
    assert not allows(tokenizer, one, written(form, COUNT, CLOCK))
    for text in (
        "",
        "Let me see.",
        written(form, ("count", '{"a": "x"}')),
        written(form, ("count", '{"a": 7, "b": 1}')),
        written(form, ("other", "{}")),
        written(form, ("clock", "[]")),
        written(form, COUNT)[:-1],
    ):
        assert not allows(tokenizer, one, text)


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON, MISTRAL])
def test_an_answer_of_a_schema_may_stand_instead(tokenizer: LLTokenizer, form: CallFormat) -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    grammar = tool_grammar(form, TOOLS, None, json.dumps(schema))
    assert allows(tokenizer, grammar, written(form, COUNT, CLOCK))
    assert allows(tokenizer, grammar, '{"title": "x"}')
    assert not allows(tokenizer, grammar, '{"titel": "x"}'[:-1])
    assert read(form, '{"title": "x"}').content == '{"title": "x"}'


def test_an_embedded_schema_refers_to_itself_and_has_no_words_for_people() -> None:
    schema: dict[str, Any] = {
        "title": "T",
        "description": "long",
        "properties": {
            "description": {"type": "string", "description": "long", "default": "x"},
            "kind": {"enum": [{"title": "kept", "$ref": "#"}], "examples": [1]},
            "$ref": {"$ref": "#/$defs/A"},
        },
        "anyOf": [{"title": "T", "required": ["description"]}, {"$ref": "#"}],
    }
    assert embedded(schema, "#/x") == {
        "properties": {
            "description": {"type": "string"},
            "kind": {"enum": [{"title": "kept", "$ref": "#"}]},
            "$ref": {"$ref": "#/x/$defs/A"},
        },
        "anyOf": [{"required": ["description"]}, {"$ref": "#/x"}],
    }


def test_parameters_that_are_too_deep_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"not": deep}
    with pytest.raises(InvalidRequest) as caught:
        tool_grammar(HERMES, [ToolFunction("f", parameters=deep)], 1)
    assert caught.value.param == "tools.f.parameters"
