"""From a request's grammar to a definition for llguidance, and its refusals in a user's words."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine_svc.planning.step import Grammar, GrammarForm
from protos.wire.errors import InvalidRequest

# The library recurses along rules that name one another: these, with the stack of the compiler's
# threads, keep the longest chain that fits in a text from overflowing it.
_MAX_SCHEMA_BYTES: Final = 128 << 10
_MAX_RULE_BYTES: Final = 16 << 10
_MAX_SCHEMA_DEPTH: Final = 64
_LARK_SCHEMA: Final = re.compile(r"%json\s*(?=\{)")
_GBNF_RULE: Final = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_JSON_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
# Between two tokens of JSON: nothing, a blank, or a new line and its indentation. Any run of blanks
# is JSON as well, but models get lost in it until their tokens are used up.
_JSON_WHITESPACE: Final = r" |\n[ \t]{0,40}"
# How the library begins what it says of a schema inside a grammar.
_SCHEMA_IN_LARK: Final = "failed to compile JSON schema"
_FORM_NAMES: Final = {
    GrammarForm.JSON_SCHEMA: "JSON schema",
    GrammarForm.REGEX: "regular expression",
    GrammarForm.GRAMMAR: "grammar",
}
# What the library says of a schema, where its words name no keyword, or are not a user's.
_SCHEMA_PROBLEMS: Final[Mapping[str, str]] = {
    r"Unimplemented keys: \[(.*)\]": r"the keyword \1 is not supported",
    r"oneOf constraints are not supported": (
        "oneOf is supported only where no value can match two of its branches; use anyOf"
    ),
    r"Unknown format: (.*)": r"the format \1 is not known",
    r"(?s)regex parse error.*error: (.*)": r"pattern: \1",
    r"Resource '(.*?)'": r"$ref reaches for \1, but only the schema itself can be named",
    r"Pointer '(.*?)' does not exist": r"$ref names #\1, which does not exist",
    r"anyOf is empty": "an enum or anyOf is empty, so that nothing can match",
    r"circular references? .*": "a $ref leads back to itself beside other keywords",
}


def definition_of(grammar: Grammar) -> str:
    """The definition to make matchers from. Raises InvalidRequest for what is plainly wrong."""
    text, form = grammar.text, grammar.form
    match form:
        case GrammarForm.JSON_SCHEMA:
            _check_schema(form, text)
            return _schema_definition(text)
        case GrammarForm.REGEX:
            _check_size(form, text, _MAX_RULE_BYTES)
            return LLMatcher.grammar_from_regex(text)
        case GrammarForm.GRAMMAR:
            schemas, rules = _split_schemas(text)
            _check_size(form, rules, _MAX_RULE_BYTES)
            _check_schema(form, schemas)
            return LLMatcher.grammar_from_lark(_lark(text))


def writes_json(grammar: Grammar) -> bool:
    """Whether JSON schemas say what most of the text is."""
    return grammar.form is GrammarForm.JSON_SCHEMA or (
        grammar.form is GrammarForm.GRAMMAR and bool(_LARK_SCHEMA.search(grammar.text))
    )


def refusal(grammar: Grammar, library_message: str) -> InvalidRequest:
    """What to tell a user of a grammar that the library does not take."""
    form = grammar.form
    if library_message.startswith("panic"):
        return _refused(form, "it is too large once its alternatives are multiplied out")
    if "increase limits" in library_message:
        return too_complex(grammar)
    is_schema = form is GrammarForm.JSON_SCHEMA or _SCHEMA_IN_LARK in library_message
    if not is_schema:
        return _refused(form, library_message.strip().partition("\n   1 |")[0])
    for pattern, problem in _SCHEMA_PROBLEMS.items():
        if found := re.search(pattern, library_message):
            return _refused(form, found.expand(problem), code="unsupported_schema")
    return _refused(form, library_message.partition("\n")[0], code="unsupported_schema")


def too_complex(grammar: Grammar) -> InvalidRequest:
    """For a grammar whose first mask takes too long, or passes the library's limits."""
    return _refused(grammar.form, "it is too complex", code="grammar_too_complex")


def _check_size(form: GrammarForm, text: str, limit: int) -> None:
    if len(text.encode()) > limit:
        raise _refused(form, f"it is longer than {limit} bytes")


def _check_schema(form: GrammarForm, text: str) -> None:
    _check_size(form, text, _MAX_SCHEMA_BYTES)
    depth = _depth(text)
    if depth > _MAX_SCHEMA_DEPTH:
        raise _refused(form, f"it is {depth} levels deep, of at most {_MAX_SCHEMA_DEPTH}")


def _split_schemas(lark: str) -> tuple[str, str]:
    """The JSON schemas that stand in a Lark text, one after the other, and what is left of it."""
    schemas, rules, position = [], [], 0
    while found := _LARK_SCHEMA.search(lark, position):
        rules.append(lark[position : found.end()])
        position = found.end()
        # What is no JSON, or too deep for Python's reader, counts as rules.
        with contextlib.suppress(ValueError, RecursionError):
            _, end = json.JSONDecoder().raw_decode(lark, position)
            schemas.append(lark[position:end])
            position = end
    return "".join(schemas), "".join([*rules, lark[position:]])


def _schema_definition(text: str) -> str:
    options = {
        "whitespace_pattern": _JSON_WHITESPACE,
        # A keyword that cannot be enforced is refused, never ignored.
        "lenient": False,
        "coerce_one_of": False,
    }
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    except ValueError as error:
        raise _refused(GrammarForm.JSON_SCHEMA, f"it is not a JSON object ({error})") from None


def _depth(json_text: str) -> int:
    """How deep objects and arrays nest."""
    deepest = depth = 0
    for character in _JSON_STRING.sub("", json_text):
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _lark(text: str) -> str:
    """Lark as it is, GBNF translated."""
    if not _GBNF_RULE.search(text):
        return text
    try:
        return any_to_lark(text)
    # The translator raises bare Exceptions for what it cannot read, and recurses as the text nests.
    except Exception as error:
        problem = str(error) if not isinstance(error, RecursionError) else "it nests too deeply"
        raise _refused(GrammarForm.GRAMMAR, f"GBNF that cannot be translated: {problem}") from None


def _refused(form: GrammarForm, problem: str, code: str = "invalid_grammar") -> InvalidRequest:
    return InvalidRequest(
        f"The {_FORM_NAMES[form]} cannot be enforced: {problem}.", code=code, param="grammar"
    )
