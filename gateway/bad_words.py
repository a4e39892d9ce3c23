"""Words that must not appear in an answer, as the token sequences that an engine bans."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gateway.field_checks import check_in_vocabulary, invalid_value
from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2

Encode = Callable[[tokenizer_pb2.EncodeRequest], Awaitable[tokenizer_pb2.EncodeResponse]]


async def banned_sequences(
    words: Sequence[str], vocab_size: int, encode: Encode
) -> list[common_pb2.TokenSequence]:
    """How each word is written at the start of a text and, after a blank, within one.

    The second is left out where it ends like the first, which bans it already. Raises
    InvalidRequest for a word that has no tokens, or none that the model can make.
    """
    stripped = [word.lstrip() for word in words]
    texts = [*stripped, *(f" {word}" for word in stripped)]
    responses = await asyncio.gather(*(encode(_text_prompt(text)) for text in texts))
    encoded = [response.token_ids for response in responses]
    banned: list[common_pb2.TokenSequence] = []
    for index, (at_start, within) in enumerate(
        zip(encoded[: len(words)], encoded[len(words) :], strict=True)
    ):
        param = f"bad_words[{index}]"
        if not at_start:
            raise invalid_value("A bad word must have tokens.", param)
        forms = [list(at_start)]
        if list(within[-len(at_start) :]) != forms[0]:
            forms.append(list(within))
        for form in forms:
            check_in_vocabulary(form, vocab_size, param)
            banned.append(common_pb2.TokenSequence(token_ids=form))
    return banned


def _text_prompt(text: str) -> tokenizer_pb2.EncodeRequest:
    return tokenizer_pb2.EncodeRequest(
        text=tokenizer_pb2.TextPrompt(text=text, add_special_tokens=False)
    )
