"""Puts messages into the form that the model's template takes."""

import json
from typing import Any

from tokenizer_svc.template_traits import TemplateTraits


def suited_messages(messages: list[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Copies of `messages` in the form that a template with `traits` takes.

    Text parts are joined by a newline unless the template takes parts; `developer` is `system`
    where the template does not know it; missing content is empty; a call's arguments are parsed
    where the template would quote their JSON text again.
    """
    return [_suited(message, traits) for message in messages]


def _suited(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    suited = {**message, "content": _suited_content(message, traits)}
    if message["role"] == "developer" and not traits.takes_developer:
        suited["role"] = "system"
    calls = message.get("tool_calls")
    if isinstance(calls, list) and not traits.takes_argument_text:
        suited["tool_calls"] = [_with_argument_object(call) for call in calls]
    return suited


def _suited_content(message: dict[str, Any], traits: TemplateTraits) -> Any:
    content = message.get("content")
    if content is None:
        if traits.takes_null_content and message.get("tool_calls"):
            return None
        content = ""
    if isinstance(content, list) and not traits.takes_parts:
        return "\n".join(part["text"] for part in content)
    if isinstance(content, str) and not traits.takes_text:
        return [{"type": "text", "text": content}]
    return content


def _with_argument_object(call: Any) -> Any:
    """`call` with its arguments parsed; as it is where they are no JSON object."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    return {**call, "function": {**function, "arguments": value}}
