"""Bodies of POST /v1/messages and its count_tokens, after Anthropic's Messages API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.field_checks import MAX_MESSAGES
from gateway.generation_fields import TokenCount

_INT32_MAX = (1 << 31) - 1


class InputMessage(msgspec.Struct, kw_only=True):
    """`content` is text, or blocks that are checked in message_input.py."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class MessageTool(msgspec.Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    """`name` belongs to the type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Switches thoughts on or off where the model's template can; a budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    format: OutputFormat | None = None


class MessagesToCount(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens. Unknown fields are ignored."""

    model: str
    messages: Annotated[list[InputMessage], Meta(max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(MessagesToCount, kw_only=True):
    """POST /v1/messages."""

    max_tokens: TokenCount
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None
