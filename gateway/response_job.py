"""From the body of a response to the chat that answers it, and to the object it begins as."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.field_checks import invalid_value
from gateway.openai_schema import ChatCompletionRequest
from gateway.response_schema import ResponseRequest, TextFormat

_SAME_FIELDS = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "stop", "parallel_tool_calls",
    "chat_template_kwargs", "cache_salt", "timeout", "user", "metadata",
)  # fmt: skip


def chat_request(
    body: ResponseRequest, messages: Sequence[dict[str, Any]]
) -> ChatCompletionRequest:
    """The chat completion that answers the response. Raises InvalidRequest."""
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    if not messages:
        raise invalid_value("`input` must not be empty.", "input")
    fields = {name: getattr(body, name) for name in _SAME_FIELDS}
    return ChatCompletionRequest(
        **fields,
        messages=msgspec.Raw(msgspec.json.encode(messages)),
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        tools=msgspec.Raw(msgspec.json.encode(_tools(body))),
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body.text.format if body.text else None),
        logprobs=body.has_logprobs or None,
        top_logprobs=body.top_logprobs,
    )


def new_response(
    body: ResponseRequest, chat: ChatCompletionRequest, response_id: str, created: int
) -> dict[str, Any]:
    """The object of the API before anything was generated."""
    form = body.text.format if body.text and body.text.format else TextFormat(type="text")
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": chat.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {k: v for k, v in msgspec.to_builtins(form).items() if v is not None}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [msgspec.to_builtins(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _tools(body: ResponseRequest) -> list[dict[str, Any]] | None:
    if not body.tools:
        return None
    names = ("name", "description", "parameters", "strict")
    return [
        {
            "type": "function",
            "function": {n: v for n in names if (v := getattr(tool, n)) is not None},
        }
        for tool in body.tools
    ]


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    for name in ("name", "schema"):
        if getattr(form, name) is None:
            raise invalid_value(
                f"Missing required field `text.format.{name}`.", f"text.format.{name}"
            )
    schema = {"name": form.name, "schema": form.schema}
    return {"type": "json_schema", "json_schema": schema}
