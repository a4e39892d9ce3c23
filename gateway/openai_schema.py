"""Request bodies of the OpenAI API, and the only home of their defaults and ranges.

Unknown fields are ignored. A known field whose effect does not exist here is refused unless its
value asks for nothing (`_NEUTRAL_VALUES`). Null means absent everywhere.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from protos.common.v1 import common_pb2
from protos.wire.errors import InvalidRequest

MAX_STOP_STRINGS: Final = 16
MAX_CHOICES_PER_PROMPT: Final = 128
MAX_CHOICES_PER_REQUEST: Final = 1024

_INT64 = Meta(ge=-(1 << 63), le=(1 << 63) - 1)
_TOKEN_ID = Meta(ge=0, le=(1 << 32) - 1)

Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenCount = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]

# The values, besides null, that ask for nothing of each field that is not supported.
_NEUTRAL_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "timeout": (),
    "tool_choice": ("none", "auto"),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Fields of both endpoints that are read only to be refused."""

    allowed_token_ids: Any = None
    bad_words: Any = None
    echo: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    priority: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    stop_token_ids: Any = None
    structured_outputs: Any = None
    timeout: Any = None


class GenerationFields(UnsupportedFields, kw_only=True):
    """What both endpoints share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, _INT64] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES_PER_PROMPT)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
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

    def sampling(self) -> common_pb2.SamplingParameters:
        """All but what the model and the prompt decide: seed, max_tokens and EOS tokens."""
        top_p = _or(self.top_p, 1.0)
        return common_pb2.SamplingParameters(
            # The likeliest token alone is what a nucleus of no mass comes to.
            temperature=_or(self.temperature, 1.0) if top_p > 0 else 0.0,
            top_p=top_p if top_p > 0 else 1.0,
            top_k=max(0, _or(self.top_k, 0)),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
        )

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        self._refuse_unsupported()
        if self.stream_options is not None:
            if not self.streams:
                raise InvalidRequest(
                    "`stream_options` is only allowed when `stream` is true.",
                    code="invalid_value",
                    param="stream_options",
                )
            if self.stream_options.continuous_usage_stats:
                raise _unsupported("stream_options.continuous_usage_stats", (False,))
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"`stop` has {len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS} are "
                "allowed.",
                code="invalid_value",
                param="stop",
            )
        for index, text in enumerate(self.stop_strings):
            if not text:
                raise InvalidRequest(
                    "A stop string must not be empty.",
                    code="invalid_value",
                    param="stop" if isinstance(self.stop, str) else f"stop[{index}]",
                )

    def _refuse_unsupported(self) -> None:
        for name in self.__struct_fields__:
            if name not in _NEUTRAL_VALUES:
                continue
            value = getattr(self, name)
            neutral = _NEUTRAL_VALUES[name]
            # Types count too: in Python 0 == False.
            if value is None or any(type(value) is type(n) and value == n for n in neutral):
                continue
            raise _unsupported(name, neutral)


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions. `messages` and `tools` are checked in chat_messages.py."""

    messages: msgspec.Raw
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Any = None

    add_generation_prompt: Any = None
    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    web_search_options: Any = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    def sampling(self) -> common_pb2.SamplingParameters:
        sampling = GenerationFields.sampling(self)
        sampling.logprobs = bool(self.logprobs)
        sampling.top_logprobs = self.top_logprobs or 0
        return sampling

    def check(self) -> None:
        GenerationFields.check(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "`top_logprobs` is only allowed when `logprobs` is true.",
                code="invalid_value",
                param="top_logprobs",
            )


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    # A string, a list of strings, a list of token ids, or a list of lists of token ids.
    prompt: str | list[str | Annotated[int, _TOKEN_ID] | list[Annotated[int, _TOKEN_ID]]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: Any = None

    def sampling(self) -> common_pb2.SamplingParameters:
        sampling = GenerationFields.sampling(self)
        sampling.logprobs = self.logprobs is not None
        sampling.top_logprobs = self.logprobs or 0
        return sampling

    def check(self) -> None:
        GenerationFields.check(self)
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequest(
                "`best_of` is supported only when it equals `n`.",
                code="unsupported_value",
                param="best_of",
            )

    def prompts(self) -> list[str] | list[tuple[int, ...]]:
        """One entry per prompt, all of one kind. Raises InvalidRequest."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(entry, str) for entry in self.prompt):
            prompts: Any = list(self.prompt)
        elif all(isinstance(entry, int) for entry in self.prompt):
            prompts = [tuple(self.prompt)]
        elif all(isinstance(entry, list) for entry in self.prompt):
            prompts = [tuple(entry) for entry in self.prompt if isinstance(entry, list)]
        else:
            raise _bad_prompt("`prompt` mixes strings, token ids and lists of token ids.")
        if not prompts or not all(isinstance(prompt, str) or prompt for prompt in prompts):
            raise _bad_prompt("`prompt` must not be empty.")
        if len(prompts) * self.num_choices > MAX_CHOICES_PER_REQUEST:
            raise _bad_prompt(
                f"Prompts times `n` come to {len(prompts) * self.num_choices} choices; at most "
                f"{MAX_CHOICES_PER_REQUEST} are allowed."
            )
        return prompts  # type: ignore[no-any-return]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _bad_prompt(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_value", param="prompt")


def _unsupported(param: str, neutral: tuple[object, ...]) -> InvalidRequest:
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    message = f"`{param}` is not supported by this server" + (
        f" with a value other than {allowed}." if allowed else "."
    )
    return InvalidRequest(message, code="unsupported_value", param=param)
