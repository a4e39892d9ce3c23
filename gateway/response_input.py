"""Between the items of the Responses API and the messages of a chat."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gateway.field_checks import invalid_value
from protos.wire.errors import InvalidRequest

_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal", "reasoning_text")

Message = dict[str, Any]


def messages_of(items: Iterable[Mapping[str, Any]], param: str = "input") -> list[Message]:
    """The chat messages that items say. Raises InvalidRequest with the path at fault.

    Calls that follow each other, or the assistant's text, are one message, as chat templates want
    it. Thoughts are left out: templates drop those of earlier turns.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        path = f"{param}[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message(item, path))
        elif kind == "function_call":
            _add_call(messages, item, path)
        elif kind == "function_call_output":
            messages.append(_result(item, path))
        elif kind != "reasoning":
            raise InvalidRequest(
                f"Items of type `{kind}` are not supported.",
                code="unsupported_value",
                param=f"{path}.type",
            )
    return messages


def input_items(given: str | Sequence[Mapping[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """The input as a list of items, each with an id and a type."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for index, item in enumerate(given):
        whole = {"id": f"item_{response_id}_{index}", "type": "message", **item}
        if isinstance(whole.get("content"), str):
            kind = "output_text" if whole.get("role") == "assistant" else "input_text"
            part: dict[str, Any] = {"type": kind, "text": whole["content"]}
            if kind == "output_text":
                part["annotations"] = []
            whole["content"] = [part]
        items.append(whole)
    return items


def _message(item: Mapping[str, Any], path: str) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid_value(f"`{path}.role` must be one of {', '.join(_ROLES)}.", f"{path}.role")
    return {"role": role, "content": _text(item.get("content"), f"{path}.content")}


def _add_call(messages: list[Message], item: Mapping[str, Any], path: str) -> None:
    function = {"name": _word(item, "name", path), "arguments": _word(item, "arguments", path)}
    call = {"id": _word(item, "call_id", path), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _result(item: Mapping[str, Any], path: str) -> Message:
    call_id = _word(item, "call_id", path)
    text = _text(item.get("output"), f"{path}.output")
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _word(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid_value(f"`{path}.{name}` must be a string.", f"{path}.{name}")
    return value


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_value(f"`{path}` must be text or a list of parts.", path)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise InvalidRequest(
                f"Content parts of type `{kind}` are not supported; only text is.",
                code="unsupported_value",
                param=f"{path}[{index}].type",
            )
        texts.append(_word(part, "refusal" if kind == "refusal" else "text", f"{path}[{index}]"))
    return "\n".join(texts)
