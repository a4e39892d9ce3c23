"""Refuses prompts that are far too large for the model before any work is done on them."""

from typing import Final

from protos.wire.errors import InvalidRequest

# How many bytes a token stands for depends on the text and only encoding tells. These are far more
# than any real prompt has, JSON's escapes included; the rest is for layout and short contexts.
_BYTES_PER_TOKEN: Final = 64
_SPARE_BYTES: Final = 1 << 20


def max_prompt_bytes(max_model_len: int) -> int:
    """The most bytes that a prompt may have for a context of `max_model_len` tokens."""
    return _SPARE_BYTES + _BYTES_PER_TOKEN * max_model_len


def check_prompt_bytes(num_bytes: int, max_model_len: int, param: str) -> None:
    """Raises InvalidRequest. `num_bytes`: of the text in UTF-8, or of a chat's JSON."""
    limit = max_prompt_bytes(max_model_len)
    if num_bytes > limit:
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens. Your prompt has "
            f"{num_bytes} bytes, more than the {limit} that are encoded for it; shorten it.",
            code="context_length_exceeded",
            param=param,
        )
