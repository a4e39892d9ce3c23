"""Checks the messages and tools of a chat, which then go to the tokenizer as they came."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.field_checks import MAX_MESSAGES
from gateway.request_body import decode_part
from gateway.tools import checked_tool_use
from protos.wire.errors import InvalidRequest

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

_TEXT_PARTS: Final = {"text": "text", "refusal": "refusal"}


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    # JSON text as a model wrote it, which may be wrong.
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(msgspec.Struct):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None


_Messages = Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]


def checked_messages(raw: msgspec.Raw) -> bytes:
    """`messages` as JSON for the chat template. Raises InvalidRequest with the path at fault.

    What the assistant refused in is text to a template, as its answers are.
    """
    messages, normalised = decode_part(raw, _Messages, "messages")
    if not messages:
        raise _invalid("`messages` must not be empty.", "messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    if any(map(_has_refusal, messages)):
        return msgspec.json.encode(list(map(_with_text, msgspec.json.decode(normalised))))
    return normalised


def checked_tools(raw: msgspec.Raw) -> bytes:
    """`tools` as JSON for the chat template; empty for none."""
    return checked_tool_use(raw, None, None).tools_json


def _check_message(message: Message, path: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise _invalid(f"`{path}.tool_calls` is the assistant's alone.", f"{path}.tool_calls")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(
            f"Missing required field `{path}.tool_call_id`.",
            code="missing_field",
            param=f"{path}.tool_call_id",
        )
    if message.content is None:
        if message.role != "assistant":
            raise _invalid(f"`{path}.content` must be text.", f"{path}.content")
        if not (message.tool_calls or message.function_call or message.refusal):
            raise _invalid(
                f"`{path}` of the assistant needs `content` or `tool_calls`.", f"{path}.content"
            )
    elif isinstance(message.content, list):
        for index, part in enumerate(message.content):
            _check_part(part, f"{path}.content[{index}]")


def _check_part(part: ContentPart, path: str) -> None:
    field = _TEXT_PARTS.get(part.type)
    if field is None:
        raise InvalidRequest(
            f"Content parts of type `{part.type}` are not supported; only text is.",
            code="unsupported_value",
            param=f"{path}.type",
        )
    if getattr(part, field) is None:
        raise _invalid(f"Missing required field `{path}.{field}`.", f"{path}.{field}")


def _has_refusal(message: Message) -> bool:
    if isinstance(message.content, list):
        return any(part.type == "refusal" for part in message.content)
    return message.content is None and message.refusal is not None


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if content is None and message.get("refusal") is not None:
        return {**message, "content": message["refusal"]}
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part
        for part in content
    ]
    return {**message, "content": parts}


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_value", param=param)
