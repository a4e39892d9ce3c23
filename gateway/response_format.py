"""Structured output: `response_format`, `structured_outputs` and their kin become a grammar."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.field_checks import invalid_value
from gateway.request_body import invalid_field
from protos.common.v1 import common_pb2

# What a schema or grammar may come to; engines bound the time that compiling one takes.
MAX_GRAMMAR_CHARACTERS: Final = 1 << 17
MAX_SCHEMA_DEPTH: Final = 64
MAX_PATTERN_CHARACTERS: Final = 1 << 14
MAX_STRINGS_TO_CHOOSE: Final = 1024

_SPECIAL_IN_PATTERNS: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`strict` changes nothing: a schema is always kept to."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field: exactly one of these. `json` is a schema, as an object or as its text."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredFields(msgspec.Struct, kw_only=True):
    """The fields of a body that ask for structured output."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text must match, and the field that says so."""

    grammar: common_pb2.Grammar
    param: str


def structure_of(fields: StructuredFields) -> Structure | None:
    """The structure that a body asks for, if any. Raises InvalidRequest."""
    structures = [
        *_from_response_format(fields.response_format),
        *_from_structured_outputs(fields.structured_outputs),
        *_from_forms(
            StructuredOutputs(
                json=fields.guided_json,
                regex=fields.guided_regex,
                choice=fields.guided_choice,
                grammar=fields.guided_grammar,
            ),
            "guided_",
        ),
    ]
    if len(structures) > 1:
        first, second, *_ = structures
        raise invalid_value(
            f"`{second.param}` and `{first.param}` exclude each other: at most one structure can "
            "be asked for.",
            second.param,
        )
    return structures[0] if structures else None


def checked_schema(schema: dict[str, Any], param: str) -> str:
    """The schema as JSON text, if it is not too large or too deep."""
    text = msgspec.json.encode(schema).decode()
    _check_size(len(text), param, MAX_GRAMMAR_CHARACTERS)
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise invalid_value(
                f"`{param}` is nested deeper than {MAX_SCHEMA_DEPTH} levels.", param
            )
        level = [child for value in level for child in _children(value)]
    return text


def _from_response_format(value: Any) -> list[Structure]:
    if value is None:
        return []
    wanted = _converted(value, ResponseFormat, "response_format")
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [_json_structure('{"type":"object"}', "response_format")]
    param = "response_format.json_schema"
    if wanted.json_schema is None:
        raise invalid_value(f"Missing required field `{param}`.", param)
    param += ".schema"
    return [_json_structure(checked_schema(wanted.json_schema.schema, param), param)]


def _from_structured_outputs(value: Any) -> list[Structure]:
    if value is None:
        return []
    param = "structured_outputs"
    structures = _from_forms(_converted(value, StructuredOutputs, param), f"{param}.")
    if not structures:
        raise invalid_value(
            f"`{param}` must have one of json, json_object, regex, choice and grammar.", param
        )
    return structures


def _from_forms(forms: StructuredOutputs, prefix: str) -> list[Structure]:
    structures: list[Structure] = []
    if forms.json is not None:
        param = f"{prefix}json"
        structures.append(_json_structure(_schema_text(forms.json, param), param))
    if forms.json_object:
        structures.append(_json_structure('{"type":"object"}', f"{prefix}json_object"))
    if forms.regex is not None:
        param = f"{prefix}regex"
        _check_text(forms.regex, param, MAX_PATTERN_CHARACTERS)
        structures.append(Structure(common_pb2.Grammar(regex=forms.regex), param))
    if forms.choice is not None:
        param = f"{prefix}choice"
        pattern = _pattern_of(forms.choice, param)
        structures.append(Structure(common_pb2.Grammar(regex=pattern), param))
    if forms.grammar is not None:
        param = f"{prefix}grammar"
        _check_text(forms.grammar, param, MAX_GRAMMAR_CHARACTERS)
        structures.append(Structure(common_pb2.Grammar(grammar=forms.grammar), param))
    return structures


def _json_structure(schema: str, param: str) -> Structure:
    return Structure(common_pb2.Grammar(json_schema=schema), param)


def _schema_text(schema: dict[str, Any] | str, param: str) -> str:
    if isinstance(schema, str):
        _check_text(schema, param, MAX_GRAMMAR_CHARACTERS)
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid_value(f"`{param}` is not the JSON of a schema.", param) from error
    return checked_schema(schema, param)


def _pattern_of(strings: list[str], param: str) -> str:
    """A regular expression for one of `strings`."""
    if not strings or not all(strings):
        raise invalid_value(f"`{param}` must list strings that are not empty.", param)
    if len(strings) > MAX_STRINGS_TO_CHOOSE:
        raise invalid_value(
            f"`{param}` has {len(strings)} strings; at most {MAX_STRINGS_TO_CHOOSE} are allowed.",
            param,
        )
    # Before any work on them: writing them as a pattern only makes them longer.
    _check_size(sum(map(len, strings)), param, MAX_GRAMMAR_CHARACTERS)
    escaped = [_SPECIAL_IN_PATTERNS.sub(r"\\\g<0>", text) for text in dict.fromkeys(strings)]
    pattern = "|".join(escaped)
    _check_size(len(pattern), param, MAX_GRAMMAR_CHARACTERS)
    return pattern if len(escaped) == 1 else f"({pattern})"


def _check_text(text: str, param: str, max_characters: int) -> None:
    _check_size(len(text), param, max_characters)
    if not text.strip():
        raise invalid_value(f"`{param}` must not be empty.", param)


def _check_size(num_characters: int, param: str, max_characters: int) -> None:
    if num_characters > max_characters:
        raise invalid_value(
            f"`{param}` has {num_characters} characters; at most {max_characters} are allowed.",
            param,
        )


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [child for child in value.values() if isinstance(child, dict | list)]
    if isinstance(value, list):
        return [child for child in value if isinstance(child, dict | list)]
    return []


def _converted(value: Any, kind: Any, param: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error, param) from error
