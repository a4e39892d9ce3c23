"""The grammar that holds a model to calling tools, in the format it was taught."""

import json
from collections.abc import Sequence

from gateway.response_format import checked_schema
from gateway.tool_call_format import CallFormat
from gateway.tools import ToolFunction
from protos.common.v1 import common_pb2


def tool_grammar(
    form: CallFormat,
    tools: Sequence[ToolFunction],
    max_calls: int | None,
    answer_schema: str = "",
) -> common_pb2.Grammar:
    """One call of one of `tools`, or several; their arguments keep to the tools' parameters.

    answer_schema: a JSON Schema; an answer that keeps to it may stand instead of calls.

    In Lark, with each tool's parameters as a JSON Schema of its own, so that references inside them
    lead where their author meant them to. Of the openers only text is written: one that is a
    control token cannot be told from its spelling here, and the parser needs none. Raises
    InvalidRequest when a schema is too large or too deep.
    """
    before, between, after = _layout(form)
    lines = [
        f"start: calls{' | answer' if answer_schema else ''}",
        f"calls: {before}call{'' if max_calls == 1 else f' ({between} call)*'}{after}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
    ]
    opening, closing = ("", "")
    if form.closer and not form.bracket:
        opening, closing = f"{form.opener}\n", f"\n{form.closer}"
    for index, tool in enumerate(tools):
        schema = checked_schema(
            {"type": "object", **(tool.parameters or {})}, f"tools.{tool.name}.parameters"
        )
        head = f'{opening}{{"name": "{tool.name}", "{form.arguments_key}": '
        lines += (
            f"call_{index}: {json.dumps(head)} arguments_{index} {json.dumps('}' + closing)}",
            f"arguments_{index}: %json {schema}",
        )
    if answer_schema:
        lines.append(f"answer: %json {answer_schema}")
    return common_pb2.Grammar(grammar="\n".join(lines) + "\n")


def _layout(form: CallFormat) -> tuple[str, str, str]:
    """Lark for what stands before the first call, between two, and after the last."""
    if form.bracket:
        return f"{json.dumps(form.bracket)} ", json.dumps(f"{form.separator} "), f' "{form.closer}"'
    return "", json.dumps(f"{form.separator} " if form.separator else "\n"), ""
