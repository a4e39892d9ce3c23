"""What the endpoints answer, as /openapi.json describes it; answers may have more fields.


They are not built from these types: streams write the same JSON piece by piece. The tests hold
every answer to them.
"""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "timeout"]


class ErrorDetail(msgspec.Struct):
    """`param` names the field at fault, `code` is a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorDetail


class TokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageAnswer(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokensDetails


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: FinishReason | None
    logprobs: dict[str, Any] | None


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: dict[str, Any] | None


class TextCompletion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageAnswer


class ResponseAnswer(msgspec.Struct):
    """A response of the Responses API; `output` is a list of its items."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ItemList(msgspec.Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deletion(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class MessageAnswer(msgspec.Struct):
    """A message of the Messages API; `content` is a list of its blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class MessageTokens(msgspec.Struct):
    input_tokens: int


class MessageErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessageErrorAnswer(msgspec.Struct):
    type: Literal["error"]
    error: MessageErrorDetail


class ModelAnswer(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelAnswer]


class RequestAnswer(msgspec.Struct):
    """A request in the line. `state` is its stage; times are unix seconds by stage."""

    id: str
    object: Literal["request"]
    state: Literal["preprocessing", "waiting", "prefilling", "decoding", "finished"]
    finish_reason: str | None
    endpoint: str
    model: str
    stage_times: dict[str, float]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class RequestList(msgspec.Struct):
    object: Literal["list"]
    data: list[RequestAnswer]


class HealthAnswer(msgspec.Struct):
    status: str


class ReadinessAnswer(msgspec.Struct):
    """Whether requests can be served now, and what is missing if not."""

    ready: bool
    message: str
    missing: list[str]
    model: str | None


class AboutAnswer(msgspec.Struct):
    name: str
    version: str
    endpoints: list[str]
