"""Bodies of POST /v1/responses, after OpenAI's Responses API."""

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from gateway.field_checks import MAX_MESSAGES, check_metadata, refuse_unsupported
from gateway.generation_fields import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_TIMEOUT_SECONDS,
    NeutralValues,
    Penalty,
    TokenCount,
)

_INT64: Final = Meta(ge=-(1 << 63), le=(1 << 63) - 1)
_INT32_MAX: Final = (1 << 31) - 1
LOGPROBS: Final = "message.output_text.logprobs"

# The values, besides null, that ask for nothing of each field that is not supported.
_NEUTRAL: Final[NeutralValues] = {
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
}


class FunctionTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """`name`, `schema` and `strict` belong to the type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses. `input` is checked in response_input.py; unknown fields are ignored."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    # Not in OpenAI's API: the same as in chat completions.
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, _INT64] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARACTERS)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_SECONDS)] | None = None

    # Read only to be refused.
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    truncation: Any = None
    service_tier: Any = None

    neutral_values: ClassVar[NeutralValues] = _NEUTRAL

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        refuse_unsupported(self, _NEUTRAL)
        check_metadata(self.metadata)
