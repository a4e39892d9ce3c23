"""Request bodies of the OpenAI API: what each endpoint adds to the shared fields.

See generation_fields.py for the shared ones and for what holds of all.
"""

from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from gateway.field_checks import invalid_value
from gateway.generation_fields import (
    NEUTRAL_VALUES,
    GenerationFields,
    NeutralValues,
    NumChoices,
    TokenCount,
    TokenCountOrNone,
    TokenId,
)
from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2

MAX_CHOICES_PER_REQUEST: Final = 1024

# The values, besides null, that ask for nothing of each field that the endpoint does not support.
_NEUTRAL_IN_CHATS: Final[NeutralValues] = {
    **NEUTRAL_VALUES,
    "audio": (),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}
_NEUTRAL_IN_COMPLETIONS: Final[NeutralValues] = {**NEUTRAL_VALUES, "suffix": ("",)}


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions. `messages` are checked in chat_messages.py, tools in tools.py."""

    neutral_values: ClassVar[NeutralValues] = _NEUTRAL_IN_CHATS

    messages: msgspec.Raw
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    audio: Any = None
    chat_template: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    web_search_options: Any = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def adds_generation_prompt(self) -> bool:
        """By default, unless the last message is to be continued."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def sampling(
        self, vocab_size: int, defaults: tokenizer_pb2.GenerationDefaults
    ) -> common_pb2.SamplingParameters:
        sampling = GenerationFields.sampling(self, vocab_size, defaults)
        sampling.logprobs = bool(self.logprobs)
        sampling.top_logprobs = self.top_logprobs or 0
        return sampling

    def check(self) -> None:
        GenerationFields.check(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_value(
                "`top_logprobs` is only allowed when `logprobs` is true.", "top_logprobs"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid_value(
                "`continue_final_message` and `add_generation_prompt` exclude each other.",
                "continue_final_message",
            )


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    neutral_values: ClassVar[NeutralValues] = _NEUTRAL_IN_COMPLETIONS

    # A string, a list of strings, a list of token ids, or a list of lists of token ids.
    prompt: str | list[str | TokenId | list[TokenId]]
    # Zero only to echo the prompt.
    max_tokens: TokenCountOrNone | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: NumChoices | None = None
    echo: bool | None = None
    suffix: Any = None

    @property
    def num_choices(self) -> int:
        return self.num_returned if self.best_of is None else self.best_of

    @property
    def num_returned(self) -> int:
        """Choices per prompt that the answer has: the best of those drawn."""
        return 1 if self.n is None else self.n

    def sampling(
        self, vocab_size: int, defaults: tokenizer_pb2.GenerationDefaults
    ) -> common_pb2.SamplingParameters:
        sampling = GenerationFields.sampling(self, vocab_size, defaults)
        # The best are found by their log-probabilities.
        sampling.logprobs = self.logprobs is not None or self.num_choices > self.num_returned
        sampling.top_logprobs = self.logprobs or 0
        if self.echo and self.logprobs is not None:
            sampling.prompt_logprobs = True
            sampling.top_prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        return sampling

    def check(self) -> None:
        GenerationFields.check(self)
        if self.num_choices < self.num_returned:
            raise invalid_value("`best_of` must not be less than `n`.", "best_of")
        if self.num_choices > self.num_returned and self.streams:
            raise invalid_value(
                "`best_of` greater than `n` is not allowed when `stream` is true.", "best_of"
            )
        if self.max_tokens == 0 and not self.echo:
            raise invalid_value("`max_tokens` may be 0 only with `echo`.", "max_tokens")

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
            raise invalid_value(
                "`prompt` mixes strings, token ids and lists of token ids.", "prompt"
            )
        if not prompts or not all(isinstance(prompt, str) or prompt for prompt in prompts):
            raise invalid_value("`prompt` must not be empty.", "prompt")
        if len(prompts) * self.num_choices > MAX_CHOICES_PER_REQUEST:
            raise invalid_value(
                f"Prompts times choices come to {len(prompts) * self.num_choices}; at most "
                f"{MAX_CHOICES_PER_REQUEST} are allowed.",
                "prompt",
            )
        return prompts  # type: ignore[no-any-return]
