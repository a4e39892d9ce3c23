"""Reads the JSON of a chat and checks that it is a chat: the edge for what users send."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.stand_ins import private_use_characters

# Templates build control tokens out of a role (`<|` + role + `|>`), so roles are a closed set.
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# What a template is given under these names is not the user's to set.
_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt"})
# Levels of lists and objects: what works on the values calls itself for each.
_DEEPEST: Final = 100


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as JSON values; `tools` is None when there are none."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]


def read_chat(messages_json: bytes, tools_json: bytes = b"", variables_json: bytes = b"") -> Chat:
    """The chat of an encode request; empty bytes stand for none.

    Raises ChatRefused that names the field at fault: `messages`, `tools` or
    `chat_template_kwargs`.
    """
    messages = _read(messages_json, "messages")
    tools = _read(tools_json, "tools") if tools_json else None
    variables = _read(variables_json, "chat_template_kwargs") if variables_json else {}
    if not isinstance(messages, list) or not messages:
        raise ChatRefused("messages must be a list with at least one message.")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    if tools is not None and not isinstance(tools, list):
        raise ChatRefused("tools must be a list.", param="tools")
    if not isinstance(variables, dict):
        raise ChatRefused("chat_template_kwargs must be an object.", param="chat_template_kwargs")
    if reserved := sorted(_RESERVED & variables.keys()):
        raise ChatRefused(
            f"chat_template_kwargs must not set {', '.join(reserved)}.",
            param="chat_template_kwargs",
        )
    return Chat(messages, tools or None, variables)


def private_use_in(value: Any, param: str) -> set[str]:
    """The private-use characters in the strings of a JSON value, keys included.

    Raises ChatRefused when a string holds half of a surrogate pair, which UTF-8 cannot carry, and
    for a value that is nested too deeply.
    """
    found: set[str] = set()
    try:
        for text in _strings(value, param):
            if not text.isascii():
                text.encode()
                found |= private_use_characters(text)
    except UnicodeEncodeError as error:
        raise ChatRefused(
            f"{param} holds half of a surrogate pair (such as \\ud800), which is no character.",
            param=param,
        ) from error
    return found


def _read(raw: bytes, param: str) -> Any:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(raw, parse_constant=refuse_constant)
    except RecursionError as error:
        raise _too_deep(param) from error
    except ValueError as error:
        raise ChatRefused(f"{param} is not valid JSON.", param=param) from error
    if raw.count(b"[") + raw.count(b"{") > _DEEPEST:
        for _ in _strings(value, param):
            pass
    return value


def _too_deep(param: str) -> ChatRefused:
    return ChatRefused(f"{param} is nested too deeply.", param=param)


def _strings(value: Any, param: str) -> Iterator[str]:
    """Every string in a JSON value, keys included. Raises ChatRefused below _DEEPEST levels."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > _DEEPEST:
            raise _too_deep(param)
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            waiting.extend((inner, depth + 1) for inner in item)
        elif isinstance(item, dict):
            yield from item
            waiting.extend((inner, depth + 1) for inner in item.values())


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise ChatRefused(f"{where} must be an object.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ChatRefused(f"{where}.role must be one of {', '.join(sorted(ROLES))}.")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ChatRefused(f"{where}.content must be a string, a list of parts or null.")
    for index, part in enumerate(content):
        if not (
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            raise ChatRefused(
                f'{where}.content[{index}] must be {{"type": "text", "text": …}}; '
                "this model takes text only."
            )
