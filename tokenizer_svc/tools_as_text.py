"""Writes tools, calls and their results as text, for chat templates that know nothing of them.

The form is Hermes' (https://github.com/NousResearch/Hermes-Function-Calling), on which SmolLM2 was
trained although its template leaves the writing to the caller.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

_BEFORE: Final = "You can call functions. These are their signatures, as JSON:\n<tools>\n"
_AFTER: Final = (
    "\n</tools>\n\nTo call a function, write its name and arguments as JSON between <tool_call> "
    'and </tool_call>:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n'
    "</tool_call>\nIf no function helps, answer without calling one."
)
_RESULT_ROLES: Final = ("tool", "function")


def with_tools(messages: list[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """`messages` with a system message that describes `tools`, or with theirs extended by it."""
    listed = "\n".join(_json(tool) for tool in tools)
    description = f"{_BEFORE}{listed}{_AFTER}"
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": description}, *messages]
    content = f"{_text(first.get('content'))}\n\n{description}".lstrip()
    return [{**first, "content": content}, *messages[1:]]


def with_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with calls as text of their message, and results as messages of the user.

    Results that follow each other are one message, since templates may want turns to alternate.
    """
    written: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        if message["role"] not in _RESULT_ROLES:
            after_result = False
            written.append(_with_written_calls(message))
            continue
        result = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
        if after_result:
            written[-1]["content"] += f"\n{result}"
        else:
            written.append({"role": "user", "content": result})
        after_result = True
    return written


def _with_written_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    pieces = [text] if (text := _text(message.get("content"))) else []
    pieces += (f"<tool_call>\n{_json(_call(call))}\n</tool_call>" for call in calls)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(pieces)}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What is no JSON is shown to the model again as it wrote it.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
