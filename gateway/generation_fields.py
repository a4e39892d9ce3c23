"""The fields that all generating endpoints share, their ranges and their defaults.

Unknown fields are ignored. A known field whose effect does not exist here is refused unless its
value asks for nothing (`neutral_values`). Null means absent everywhere. Where a request is silent
the model's own generation config decides, and where that is silent too, nothing is changed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from gateway.field_checks import (
    MAX_TOKEN_ID_ENTRIES,
    check_bad_words,
    check_metadata,
    check_stop_strings,
    checked_logit_bias,
    checked_token_ids,
    invalid_value,
    refuse_unsupported,
)
from gateway.response_format import StructuredFields
from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2

MAX_CHOICES_PER_PROMPT: Final = 128
MAX_TIMEOUT_SECONDS: Final = 86_400
MAX_CACHE_SALT_CHARACTERS: Final = 1024

_INT32_MAX: Final = (1 << 31) - 1
_UINT32_MAX: Final = (1 << 32) - 1
_INT64: Final = Meta(ge=-(1 << 63), le=(1 << 63) - 1)

Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenCount = Annotated[int, Meta(ge=1, le=_UINT32_MAX)]
TokenCountOrNone = Annotated[int, Meta(ge=0, le=_UINT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_UINT32_MAX)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES_PER_PROMPT)]

NeutralValues = Mapping[str, tuple[object, ...]]

# The values, besides null, that ask for nothing of each field that no endpoint supports.
NEUTRAL_VALUES: Final[NeutralValues] = {
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UnsupportedFields(StructuredFields, kw_only=True):
    """Fields of both endpoints that are read only to be refused."""

    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


class GenerationFields(UnsupportedFields, kw_only=True):
    """What both endpoints share. `user` and `metadata` are checked and have no effect."""

    neutral_values: ClassVar[NeutralValues]

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, _INT64] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    n: NumChoices | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: TokenCountOrNone | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # Lower values run first.
    priority: Annotated[int, Meta(ge=-_INT32_MAX, le=_INT32_MAX)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARACTERS)] | None = None
    # Seconds for the whole request.
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_SECONDS)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_usage_in_chunks(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def num_choices(self) -> int:
        """Choices that are drawn per prompt."""
        return 1 if self.n is None else self.n

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that bounds a choice's tokens, and its value; None is all the room there is."""
        return "max_tokens", self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def skips_special_tokens(self) -> bool:
        return self.skip_special_tokens is not False

    def sampling(
        self, vocab_size: int, defaults: tokenizer_pb2.GenerationDefaults
    ) -> common_pb2.SamplingParameters:
        """All but what the prompt and the tokenizer decide: seed, max_tokens, EOS, bad words.

        vocab_size: rows of the model's LM head. Raises InvalidRequest for ids beyond.
        """

        def given(name: str, neutral: float) -> Any:
            value = getattr(self, name)
            if value is None and defaults.HasField(name):  # type: ignore[arg-type]
                return getattr(defaults, name)
            return neutral if value is None else value

        top_p = given("top_p", 1.0)
        return common_pb2.SamplingParameters(
            # The likeliest token alone is what a nucleus of no mass comes to.
            temperature=given("temperature", 1.0) if top_p > 0 else 0.0,
            top_p=top_p if top_p > 0 else 1.0,
            top_k=max(0, given("top_k", 0)),
            min_p=given("min_p", 0.0),
            repetition_penalty=given("repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=checked_token_ids(
                self.stop_token_ids, vocab_size, "stop_token_ids", MAX_TOKEN_ID_ENTRIES
            ),
            logit_bias=checked_logit_bias(self.logit_bias, vocab_size),
            allowed_token_ids=checked_token_ids(
                self.allowed_token_ids, vocab_size, "allowed_token_ids", vocab_size
            ),
            prompt_logprobs=self.prompt_logprobs is not None,
            top_prompt_logprobs=self.prompt_logprobs or 0,
        )

    def check(self) -> None:
        """What the types cannot say and no model is needed for. Raises InvalidRequest."""
        refuse_unsupported(self, self.neutral_values)
        if self.stream_options is not None and not self.streams:
            raise invalid_value(
                "`stream_options` is only allowed when `stream` is true.", "stream_options"
            )
        if self.prompt_logprobs is not None and self.streams:
            raise invalid_value(
                "`prompt_logprobs` is not allowed when `stream` is true.", "prompt_logprobs"
            )
        check_stop_strings(self.stop)
        check_bad_words(self.bad_words)
        check_metadata(self.metadata)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise invalid_value("`allowed_token_ids` must not be empty.", "allowed_token_ids")
