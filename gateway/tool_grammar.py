"""The grammar that holds a model to calling tools, in the format it was taught."""

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.response_format import checked_schema
from gateway.tool_call_format import CallFormat
from gateway.tools import ToolFunction
from protos.common.v1 import common_pb2

_ANNOTATIONS: Final = frozenset({"description", "title", "examples", "default", "$comment"})
# Keywords whose members are schemas by names of any kind, and those whose values are no schemas.
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA: Final = frozenset({"enum", "const", "required"})
# llguidance's: white space as models write it, and no more, since they may get lost in it.
_OPTIONS: Final = {"x-guidance": {"whitespace_pattern": r" |\n[ \t]{0,40}"}}


def tool_grammar(
    form: CallFormat,
    tools: Sequence[ToolFunction],
    max_calls: int | None,
    answer_schema: str = "",
) -> common_pb2.Grammar:
    """One call of one of `tools`, or several; their arguments keep to the tools' parameters.

    answer_schema: a JSON Schema; an answer that keeps to it may stand instead of calls.

    In Lark, where each call is a JSON Schema of its own. Of the openers only text is written: one
    that is a control token cannot be told from its spelling here, and the parser needs none. Raises
    InvalidRequest when a schema is too large or too deep.
    """
    before, between, after = _layout(form)
    opening, closing = "", ""
    if form.closer and not form.bracket:
        opening, closing = f'"{form.opener}\\n" ', f' "\\n{form.closer}"'
    lines = [
        f"start: calls{' | answer' if answer_schema else ''}",
        f"calls: {before}call{'' if max_calls == 1 else f' ({between} call)*'}{after}",
        f"call: {opening}({' | '.join(f'call_{index}' for index in range(len(tools)))}){closing}",
    ]
    for index, tool in enumerate(tools):
        lines.append(f"call_{index}: %json {_json(_call_schema(tool, form.arguments_key))}")
    if answer_schema:
        lines.append(f"answer: %json {_json(msgspec.json.decode(answer_schema))}")
    return common_pb2.Grammar(grammar="\n".join(lines) + "\n")


def embedded(schema: Any, place: str) -> Any:
    """The schema for use at `place`, a JSON pointer, of a larger one: references follow it there.

    Words for people, which are most of a schema and allow and forbid nothing, are left out.
    """
    if isinstance(schema, list):
        return [embedded(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            kept[keyword] = {name: embedded(one, place) for name, one in value.items()}
        elif keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            kept[keyword] = place + value[1:]
        elif keyword in _DATA:
            kept[keyword] = value
        elif keyword not in _ANNOTATIONS:
            kept[keyword] = embedded(value, place)
    return kept


def _call_schema(tool: ToolFunction, arguments_key: str) -> dict[str, Any]:
    parameters = {"type": "object", **(tool.parameters or {})}
    checked_schema(parameters, f"tools.{tool.name}.parameters")
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            arguments_key: embedded(parameters, f"#/properties/{arguments_key}"),
        },
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _json(schema: Any) -> str:
    return msgspec.json.encode({**schema, **_OPTIONS}).decode()


def _layout(form: CallFormat) -> tuple[str, str, str]:
    """Lark for what stands before the first call, between two, and after the last."""
    if form.bracket:
        return f"{json.dumps(form.bracket)} ", json.dumps(f"{form.separator} "), f' "{form.closer}"'
    return "", json.dumps(f"{form.separator} " if form.separator else "\n"), ""
