"""From Anthropic's messages to the chat completion that answers them."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from gateway.field_checks import invalid_value
from gateway.message_schema import MessagesRequest, MessagesToCount, MessageToolChoice
from gateway.openai_schema import ChatCompletionRequest
from protos.wire.errors import InvalidRequest

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS: Final = ("thinking", "redacted_thinking")
_SWITCH: Final = "enable_thinking"

Message = dict[str, Any]


def chat_request(body: MessagesToCount) -> ChatCompletionRequest:
    """Raises InvalidRequest with the path at fault."""
    messages = list(_messages(body))
    last = messages[-1]
    choice = body.tool_choice
    request = ChatCompletionRequest(
        model=body.model,
        messages=msgspec.Raw(msgspec.json.encode(messages)),
        # An answer goes on with what the client wrote of it.
        continue_final_message=last["role"] == "assistant" and "tool_calls" not in last,
        tools=msgspec.Raw(msgspec.json.encode(_tools(body))),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
    )
    if body.thinking is not None:
        request.chat_template_kwargs = {_SWITCH: body.thinking.type != "disabled"}
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema}
        request.response_format = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        request.max_tokens = body.max_tokens
        request.stop = body.stop_sequences
        request.stream = body.stream
        request.temperature = body.temperature
        request.top_p = body.top_p
        request.top_k = body.top_k
    return request


def _messages(body: MessagesToCount) -> Iterator[Message]:
    if not body.messages:
        raise invalid_value("`messages` must not be empty.", "messages")
    if body.system is not None:
        yield {"role": "system", "content": _text(body.system, "system")}
    for index, message in enumerate(body.messages):
        path = f"messages[{index}].content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "user":
            yield from _user(message.content, path)
        else:
            yield _assistant(message.content, path)


def _user(blocks: list[Message], path: str) -> Iterator[Message]:
    """Results of tools come first: they answer the turn before."""
    texts = []
    for index, block in enumerate(blocks):
        here = f"{path}[{index}]"
        if block.get("type") == "tool_result":
            content = _text(block.get("content", ""), f"{here}.content")
            call_id = _word(block, "tool_use_id", here)
            yield {"role": "tool", "tool_call_id": call_id, "content": content}
        else:
            texts.append(_block_text(block, here))
    if texts or not blocks:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(blocks: list[Message], path: str) -> Message:
    texts, calls = [], []
    for index, block in enumerate(blocks):
        here = f"{path}[{index}]"
        if block.get("type") == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": _word(block, "name", here), "arguments": arguments}
            calls.append({"id": _word(block, "id", here), "type": "function", "function": function})
        elif block.get("type") not in _THOUGHTS:
            texts.append(_block_text(block, here))
    message: Message = {"role": "assistant", "content": "\n".join(texts) or None}
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_value(f"`{path}` must be text or a list of blocks.", path)
    return "\n".join(_block_texts(content, path))


def _block_texts(blocks: Iterable[Any], path: str) -> Iterator[str]:
    for index, block in enumerate(blocks):
        yield _block_text(block, f"{path}[{index}]")


def _block_text(block: Any, path: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise InvalidRequest(
            f"Blocks of type `{kind}` are not supported here; only text is.",
            code="unsupported_value",
            param=f"{path}.type",
        )
    return _word(block, "text", path)


def _word(block: Message, name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid_value(f"`{path}.{name}` must be a string.", f"{path}.{name}")
    return value


def _tools(body: MessagesToCount) -> list[Message] | None:
    if not body.tools:
        return None
    tools = []
    for tool in body.tools:
        function: Message = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: MessageToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise invalid_value("Missing required field `tool_choice.name`.", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
