"""Which of a tokenizer's tokens are control tokens: those that only a template may write."""

import re

from tokenizers import AddedToken, Tokenizer

# `<|im_start|>`, and DeepSeek's with U+FF5C for a bar: some files do not mark them as special.
_MARKER = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>")


def control_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """The control tokens by id.

    Other added tokens (`<think>`, Gemma's runs of newlines) are ordinary text in a chat: the
    tokenizer's makers declared them so, and answers that come back in a history hold them.
    """
    return {
        token_id: token
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or _MARKER.fullmatch(token.content)
    }
