"""The tools that a chat may call: checks `tools` and `tool_choice`, and says what is asked for."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.field_checks import invalid_value
from gateway.request_body import decode_part, invalid_field

# OpenAI's limit.
MAX_TOOLS: Final = 128


class ToolFunction(msgspec.Struct):
    """`strict` changes nothing: see tool_grammar.py for when parameters are kept to."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: ToolFunction


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: _NamedFunction


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request may call. `tools_json`: for the chat template; empty for none.

    `must_call`: the answer consists of calls of `tools`. `max_calls` None: any number.
    """

    tools_json: bytes = b""
    tools: tuple[ToolFunction, ...] = ()
    must_call: bool = False
    max_calls: int | None = None


def checked_tool_use(
    tools: msgspec.Raw, tool_choice: Any, parallel_tool_calls: bool | None
) -> ToolUse:
    """Raises InvalidRequest with the path at fault."""
    offered, tools_json = _checked_tools(tools)
    choice = _checked_choice(tool_choice, offered)
    if not offered or choice == "none":
        return ToolUse()
    max_calls = 1 if parallel_tool_calls is False else None
    if isinstance(choice, ToolFunction):
        return ToolUse(tools_json, (choice,), must_call=True, max_calls=1)
    return ToolUse(tools_json, offered, must_call=choice == "required", max_calls=max_calls)


def _checked_tools(raw: msgspec.Raw) -> tuple[tuple[ToolFunction, ...], bytes]:
    tools, normalised = decode_part(raw, list[Tool] | None, "tools")
    tools = tools or []
    if len(tools) > MAX_TOOLS:
        raise invalid_value(
            f"`tools` has {len(tools)} tools; at most {MAX_TOOLS} are allowed.", "tools"
        )
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function, path = tool.function, f"tools[{index}].function"
        if function.name in names:
            raise invalid_value(
                f"`tools` has two functions named `{function.name}`.", f"{path}.name"
            )
        names.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            raise invalid_value(
                f"`{path}.parameters` must be the schema of an object: its `type` must be "
                '"object".',
                f"{path}.parameters",
            )
    return tuple(tool.function for tool in tools), normalised


def _checked_choice(choice: Any, offered: tuple[ToolFunction, ...]) -> str | ToolFunction:
    """ "none", "auto", "required", or the one function that is to be called."""
    if choice is None:
        return "auto"
    if choice in ("none", "auto"):
        return str(choice)
    if not offered:
        raise invalid_value(
            '`tool_choice` is only allowed when `tools` are given, unless it is "none" or "auto".',
            "tool_choice",
        )
    if choice == "required":
        return "required"
    if isinstance(choice, str):
        raise invalid_value(
            'Invalid value for `tool_choice`: it must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": …}}.',
            "tool_choice",
        )
    try:
        named = msgspec.convert(choice, _NamedTool)
    except msgspec.ValidationError as error:
        raise invalid_field(error, "tool_choice") from error
    for function in offered:
        if function.name == named.function.name:
            return function
    raise invalid_value(
        "`tool_choice` names a function that is not among the `tools`.",
        "tool_choice.function.name",
    )
