"""The compiler: what it enforces, what it refuses, in which words; that nothing crashes it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.grammar_definition import refusal
from engine_svc.planning.step import Grammar, GrammarForm
from protos.wire.errors import InvalidRequest, StartupError
from tests.fakes.grammars import byte_level_compiler, ids_of, lark, regex, schema
from tests.fakes.tiny_tokenizers import IM_END, byte_fallback

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with byte_level_compiler() as compiler:
        yield compiler


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether the whole text matches, and may end there."""
    compiler.check(grammar, []).result(30)
    matcher = compiler.matcher(grammar)
    return matcher.consume_tokens(ids_of(text)) and matcher.is_accepting()


def refusal_of(compiler: GrammarCompiler, grammar: Grammar) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        compiler.check(grammar, []).result(60)
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 500
    return caught.value


def defs(target: str, **definitions: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{target}", "$defs": definitions}


# (schema, a text that matches, a text that does not)
SCHEMAS = [
    ({"enum": ["a", "b", 3]}, '"b"', '"c"'),
    ({"const": {"x": 1}}, '{"x": 1}', '{"x": 2}'),
    ({"type": ["string", "null"]}, "null", "1"),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "3", "true"),
    ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "true", "1"),
    ({"allOf": [OBJECT, {"required": ["a"]}]}, '{"a": 1}', "{}"),
    (defs("t", t={"type": "array", "items": {"$ref": "#/$defs/t"}}), "[[], [[]]]", "[1]"),
    ({"type": "string", "pattern": "^[a-z]{2}-[0-9]+$"}, '"ab-12"', '"abc-1"'),
    ({"type": "string", "pattern": "b+"}, '"abba"', '"aa"'),
    ({"type": "string", "pattern": "^[äöü]+$"}, '"äö"', '"ab"'),
    ({"type": "string", "format": "date"}, '"2020-01-31"', '"2020-1-1"'),
    ({"type": "string", "format": "uuid"}, '"123e4567-e89b-12d3-a456-426614174000"', '"1"'),
    ({"type": "string", "format": "email"}, '"a@b.org"', '"ab"'),
    ({"type": "string", "minLength": 3, "maxLength": 4}, '"äöü"', '"ab"'),
    ({"type": "string", "maxLength": 3}, '"äöü"', '"äöüä"'),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[1, 2]", "[1]"),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "[1, 2]", "[1, 2, 3]"),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, "[1]", "[2]"),
    ({"type": "integer", "minimum": 5, "maximum": 12}, "12", "13"),
    ({"type": "integer", "exclusiveMinimum": 5}, "6", "5"),
    ({"type": "number", "minimum": 0.5, "maximum": 1.5}, "1.25", "1.75"),
    ({"type": "integer", "multipleOf": 5}, "10", "11"),
    (OBJECT, '{"a": 1}', '{"b": 1}'),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"z": 1}', '{"z": ""}'),
    ({"type": "object", "patternProperties": {"^x": OBJECT}}, '{"x": {"a": 1}}', '{"x": 1}'),
    ({"type": "object", "minProperties": 1}, '{"a": 1}', "{}"),
    ({"type": "object", "required": ["größe"]}, '{"größe": 1}', '{"a": 1}'),
    ({"type": "object"}, '{"a": [1, null]}', "[]"),
    ({"type": "integer", "title": "t", "default": 3, "x-mine": 1}, "3", "a"),
]


@pytest.mark.parametrize(
    ("document", "good", "bad"), SCHEMAS, ids=[json.dumps(s[0]) for s in SCHEMAS]
)
def test_a_schema_is_enforced(compiler, document, good: str, bad: str) -> None:
    assert accepts(compiler, schema(document), good)
    assert not accepts(compiler, schema(document), bad)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "integer"}}, "not"),
        ({"if": {}, "then": {}}, '"if", "then"'),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
        ({"type": "string", "format": "colour"}, "format colour"),
        ({"type": "string", "pattern": "a(?=b)"}, "pattern: look-around"),
        ({"type": "string", "pattern": "("}, "pattern: unclosed group"),
        ({"$ref": "https://example.org/s.json"}, r"\$ref reaches for https://example.org"),
        (defs("none"), r"\$ref names #/\$defs/none"),
        (defs("a", a={"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}), r"\$ref leads back"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, r"minLength \(5\) is greater"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "property 'a'"),
        ({"enum": []}, "enum or anyOf is empty"),
        ({"type": "objct"}, "objct"),
        ({"properties": []}, "properties must be an object"),
    ],
)
def test_what_cannot_be_enforced_is_named(compiler, document, named: str) -> None:
    error = refusal_of(compiler, schema(document))
    assert error.code == "unsupported_schema"
    assert re.match(rf"The JSON schema cannot be enforced: .*{named}", str(error))


def nested(depth: int) -> str:
    return '{"items": ' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar(GrammarForm.JSON_SCHEMA, "{"), "it is not a JSON object"),
        (Grammar(GrammarForm.JSON_SCHEMA, nested(64)), "65 levels deep, of at most 64"),
        (Grammar(GrammarForm.JSON_SCHEMA, nested(5000)), "levels deep"),
        (schema([1]), "it is not a JSON object"),
        (schema({"description": "x" * (128 << 10)}), "longer than 131072 bytes"),
        (regex("a(?=b)"), "look-around"),
        (regex("("), "unclosed group"),
        (regex("[^\\s\\S]"), "no text can match"),
        (regex("a" * (16 << 10) + "a"), "longer than 16384 bytes"),
        (lark(""), "Empty grammar"),
        (lark("start: other"), 'unknown name: "other"'),
        (lark("begin: /a/"), "no start rule"),
        (lark('start: "a'), "lexer error"),
        (lark("start: start"), "no text can match"),
        (lark("root ::= other"), "GBNF that cannot be translated: Rule 'other' not found"),
        (lark("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "it nests too deeply"),
    ],
)
def test_a_grammar_at_fault_is_refused(compiler, grammar: Grammar, problem: str) -> None:
    error = refusal_of(compiler, grammar)
    assert error.code in ("invalid_grammar", "unsupported_schema")
    assert problem in str(error)


def test_a_schema_inside_a_grammar_is_refused_in_the_same_words(compiler) -> None:
    document = json.dumps({"type": "array", "contains": {"type": "string"}})
    error = refusal_of(compiler, lark(f'start: "a" inner\ninner: %json {document}'))
    assert error.code == "unsupported_schema"
    assert str(error) == (
        'The grammar cannot be enforced: the keyword "contains" is not supported.'
    )


def test_a_grammar_over_the_library_s_limits_is_too_complex() -> None:
    """What passes them hangs on the vocabulary: 900 nullable terminals do at 49,152 tokens."""
    said = "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable …"
    error = refusal(lark('start: "a"'), said)
    assert error.code == "grammar_too_complex"
    assert str(error) == "The grammar cannot be enforced: it is too complex."


def test_braces_in_strings_are_no_depth(compiler) -> None:
    assert accepts(compiler, schema({"const": '[{"' * 100}), json.dumps('[{"' * 100))


def test_blanks_between_tokens_are_bounded(compiler) -> None:
    for good in ('{"a":1}', '{"a": 1}', '{\n  "a": 1\n}'):
        assert accepts(compiler, schema(OBJECT), good)
    for bad in ('{  "a":1}', '{\n\n"a":1}', ' {"a":1}', '{"a":1} ', "{\n" + " " * 41 + '"a":1}'):
        assert not accepts(compiler, schema(OBJECT), bad)


def test_a_schema_cannot_loosen_how_it_is_compiled(compiler) -> None:
    document = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    assert "uniqueItems" in str(refusal_of(compiler, schema(document)))


def test_a_regular_expression_is_for_the_whole_text(compiler) -> None:
    assert accepts(compiler, regex("[a-c]+ñ"), "abcñ")
    assert not accepts(compiler, regex("[a-c]+ñ"), "xabcñ")
    assert accepts(compiler, regex("^a+$"), "aa")
    assert accepts(compiler, regex("a/b"), "a/b")


def test_lark_and_gbnf_say_the_same(compiler) -> None:
    for grammar in (
        lark('start: "yes" | "no" ws /[0-9]+/\nws: /[ \\t]*/'),
        lark('root ::= "yes" | "no" ws [0-9]+ # a comment\nws ::= [ \\t]*'),
    ):
        assert accepts(compiler, grammar, "yes")
        assert accepts(compiler, grammar, "no 12")
        assert not accepts(compiler, grammar, "no")


def with_schemas(count: int, document: dict[str, Any]) -> Grammar:
    """A Lark text in which JSON schemas stand, as for calls of tools."""
    rules = " | ".join(f"s{index}" for index in range(count))
    lines = [f's{index}: "{index} " %json {json.dumps(document)}' for index in range(count)]
    return lark("\n".join([f"start: {rules}", *lines]))


def test_schemas_may_stand_in_lark_and_be_longer_than_rules(compiler) -> None:
    large = with_schemas(8, {**OBJECT, "description": "{%json " + "x" * 9000})
    assert len(large.text) > 64 << 10
    assert accepts(compiler, large, '7 {"a": 1}')
    assert not accepts(compiler, large, '7 {"b": 1}')
    error = refusal_of(compiler, with_schemas(2, {"description": "x" * (80 << 10)}))
    assert "longer than 131072 bytes" in str(error)
    deep = refusal_of(compiler, with_schemas(1, json.loads(nested(70))))
    assert "71 levels deep" in str(deep)


def test_outputs_so_far_are_replayed(compiler) -> None:
    grammar = regex("ab+c")
    assert compiler.check(grammar, ids_of("abc")).result(30) is True
    assert compiler.check(grammar, ids_of("abb")).result(30) is False
    with pytest.raises(InvalidRequest, match="does not match") as caught:
        compiler.check(grammar, ids_of("ac")).result(30)
    assert caught.value.param == "output_token_ids"


def test_a_matcher_made_without_a_check_is_the_same(compiler) -> None:
    assert compiler.matcher(regex("x?y")).consume_tokens(ids_of("xy"))
    with pytest.raises(InvalidRequest, match="unclosed group"):
        compiler.matcher(regex("("))


def test_matchers_of_one_grammar_are_independent(compiler) -> None:
    first, second = compiler.matcher(regex("ab|cd")), compiler.matcher(regex("ab|cd"))
    assert first.consume_tokens(ids_of("ab")) and second.consume_tokens(ids_of("cd"))


def test_a_byte_fallback_tokenizer_and_a_smaller_head_do(compiler) -> None:
    tokenizer = byte_fallback()
    size = tokenizer.get_vocab_size()
    ids = tokenizer.encode("ab", add_special_tokens=False).ids
    for vocab_size in (size + 30, size - 1):
        with GrammarCompiler(tokenizer.to_str().encode(), [2], vocab_size) as other:
            assert other.matcher(regex(" ab")).consume_tokens(ids)


def test_a_tokenizer_that_cannot_be_read_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="no grammars with this tokenizer"):
        GrammarCompiler(b"{}", [IM_END], 258)


HOSTILE = {
    "chain of $ref": (
        'schema({"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"properties": {"x": '
        '{"$ref": f"#/$defs/a{i + 1}"}}} for i in range(2400)} | {"a2400": {}}})'
    ),
    "chain of rules": (
        'lark("start: r0\\n" + "\\n".join(f"r{i}: r{i + 1}" for i in range(1200)) '
        """+ '\\nr1200: "a"')"""
    ),
    "chain of nullable rules": (
        'lark("start: r0\\n" + "\\n".join(f"r{i}: (r{i + 1}?)*" for i in range(900)) '
        """+ '\\nr900: "a"')"""
    ),
    "chain of nullable terminals": (
        'lark("start: R0\\n" + "\\n".join(f"R{i}: (R{i + 1}?)*" for i in range(900)) '
        """+ '\\nR900: "a"')"""
    ),
    "product of alternatives": (
        'schema({"allOf": [{"anyOf": [{"properties": {f"p{i}{k}": {"type": "integer"}}} '
        "for k in range(4)]} for i in range(6)]})"
    ),
    "nested groups": 'regex("(" * 8000 + "a" + ")" * 8000)',
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_grammar_ends_the_process_or_holds_it_up(hostile: str) -> None:
    script = (
        "from tests.fakes.grammars import *\n"
        "with byte_level_compiler() as compiler:\n"
        f"    error = compiler.check({hostile}, []).exception(20)\n"
        "    print(type(error).__name__)\n"
    )
    # In a process of its own: what would go wrong is an overflow of the stack.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["InvalidRequest"], ["NoneType"])
