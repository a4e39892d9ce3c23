"""What a model's files say about its tokenizer, as one value, from a directory or a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A model's tokenizer and what belongs to it.

    `chat_templates` maps names to Jinja text: "default", and "tool_use" where the model has another
    template for chats with tools; empty for a model without. `special_tokens` are the names that
    templates read (`bos_token`, …) with the tokens' texts. `eos_token_ids` are those the files
    name, ascending. `context_length` is in tokens, 0 when the files do not say.
    `generation_defaults` are fields of protos.tokenizer.v1.GenerationDefaults by name.
    """

    tokenizer: Tokenizer
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    context_length: int = 0
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
