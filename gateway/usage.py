"""How many tokens a request has used up to now."""

from typing import NamedTuple


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
