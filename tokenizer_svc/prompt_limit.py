"""Refuses prompts that cannot fit the model's context, most of them before they are encoded."""

from dataclasses import dataclass
from typing import Final

from protos.wire.errors import InvalidRequest
from tokenizer_svc.token_bound import TokenBound

# Up to here the tokens of a text over the limit are counted all the same, for those who ask how
# many it has. The lists of more hold the interpreter lock for so long that others wait.
_COUNTED_TOKENS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """`max_tokens`: the most that a prompt may have; 0 for no limit."""

    max_tokens: int = 0
    bound: TokenBound | None = None

    def check_text(self, text: str, param: str) -> None:
        """Raises InvalidRequest where `text` has more tokens for certain."""
        if not self.max_tokens or self.bound is None or len(text) <= self.max_tokens:
            return
        fewest = self.bound.fewest_tokens(text)
        if fewest > self.max_tokens:
            raise _too_long(
                f"Your prompt has {len(text)} characters, which are at least {fewest} tokens",
                self.max_tokens,
                param,
            )

    def check_tokens(self, num_tokens: int, param: str) -> None:
        """Raises InvalidRequest for more tokens than can be handled beside other requests."""
        if self.max_tokens and num_tokens > max(self.max_tokens, _COUNTED_TOKENS):
            raise _too_long(f"Your prompt has {num_tokens} tokens", self.max_tokens, param)


def _too_long(counted: str, limit: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. {counted}; shorten it.",
        code="context_length_exceeded",
        param=param,
    )
