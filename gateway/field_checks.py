"""What fields of a request body must hold beyond their types. All raise InvalidRequest."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from protos.common.v1 import common_pb2
from protos.wire.errors import InvalidRequest

MAX_STOP_STRINGS: Final = 16
# Each is looked for at every piece of text that the model writes.
MAX_STOP_STRING_CHARACTERS: Final = 1024
MAX_TOKEN_ID_ENTRIES: Final = 1024
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARACTERS: Final = 256
MAX_BIAS: Final = 100
# Each is checked, and rendered by a template, on its own.
MAX_MESSAGES: Final = 10_000
# OpenAI's limits.
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARACTERS: Final = 64
MAX_METADATA_VALUE_CHARACTERS: Final = 512

# Bounded, so that no absurd number is ever parsed.
_TOKEN_ID: Final = re.compile(r"[0-9]{1,10}", re.ASCII)


def invalid_value(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_value", param=param)


def unsupported_value(param: str, neutral: Sequence[object]) -> InvalidRequest:
    """The refusal of a field that is supported with the values `neutral` only."""
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    message = f"`{param}` is not supported by this server" + (
        f" with a value other than {allowed}." if allowed else "."
    )
    return InvalidRequest(message, code="unsupported_value", param=param)


def refuse_unsupported(
    body: msgspec.Struct, neutral_values: Mapping[str, Sequence[object]]
) -> None:
    """Refuses the fields named in `neutral_values`, unless null or one of their values."""
    for name in body.__struct_fields__:
        if name not in neutral_values:
            continue
        value = getattr(body, name)
        neutral = neutral_values[name]
        # Types count too: in Python 0 == False.
        if value is None or any(type(value) is type(n) and value == n for n in neutral):
            continue
        raise unsupported_value(name, neutral)


def check_stop_strings(stop: str | Sequence[str] | None) -> None:
    if stop is None:
        return
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid_value(
            f"`stop` has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.", "stop"
        )
    for index, text in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not text:
            raise invalid_value("A stop string must not be empty.", param)
        if len(text) > MAX_STOP_STRING_CHARACTERS:
            raise invalid_value(
                f"A stop string has at most {MAX_STOP_STRING_CHARACTERS} characters; `{param}` has "
                f"{len(text)}.",
                param,
            )


def check_bad_words(words: Sequence[str] | None) -> None:
    if words is None:
        return
    if len(words) > MAX_BAD_WORDS:
        raise invalid_value(
            f"`bad_words` has {len(words)} words; at most {MAX_BAD_WORDS} are allowed.",
            "bad_words",
        )
    for index, word in enumerate(words):
        if not word.strip():
            raise invalid_value("A bad word must not be blank.", f"bad_words[{index}]")
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise invalid_value(
                f"A bad word has at most {MAX_BAD_WORD_CHARACTERS} characters.",
                f"bad_words[{index}]",
            )


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA_PAIRS:
        raise invalid_value(
            f"`metadata` has {len(metadata)} pairs; at most {MAX_METADATA_PAIRS} are allowed.",
            "metadata",
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS:
            raise invalid_value(
                f"A key of `metadata` has at most {MAX_METADATA_KEY_CHARACTERS} characters.",
                "metadata",
            )
        if len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise invalid_value(
                f"A value of `metadata` has at most {MAX_METADATA_VALUE_CHARACTERS} characters.",
                "metadata",
            )


def checked_logit_bias(
    biases: Mapping[str, Any] | None, vocab_size: int
) -> list[common_pb2.LogitBias]:
    """Biases by token id, for a model whose LM head has `vocab_size` rows."""
    biases = biases or {}
    if len(biases) > MAX_TOKEN_ID_ENTRIES:
        raise invalid_value(
            f"`logit_bias` has {len(biases)} entries; at most {MAX_TOKEN_ID_ENTRIES} are allowed.",
            "logit_bias",
        )
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise invalid_value(
                f"`logit_bias` maps token ids from 0 to {vocab_size - 1}; {_shown(key)} is none.",
                "logit_bias",
            )
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid_value(
                f"The bias of token {key} in `logit_bias` must be a number from {-MAX_BIAS} to "
                f"{MAX_BIAS}.",
                "logit_bias",
            )
        checked[int(key)] = bias
    return [
        common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in checked.items()
    ]


def checked_token_ids(
    token_ids: Sequence[int] | None, vocab_size: int, param: str, max_entries: int | None = None
) -> list[int]:
    """The ids without repetitions, in order."""
    if token_ids is None:
        return []
    if max_entries is not None and len(token_ids) > max_entries:
        raise invalid_value(
            f"`{param}` has {len(token_ids)} entries; at most {max_entries} are allowed.", param
        )
    check_in_vocabulary(token_ids, vocab_size, param)
    return sorted(set(token_ids))


def check_in_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """vocab_size: rows of the model's LM head; the tokenizer may know ids beyond."""
    unknown = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if unknown is not None:
        raise invalid_value(f"Token id {unknown} is outside the vocabulary of {vocab_size}.", param)


def _shown(key: str) -> str:
    """A key for a message: quoted, and short."""
    return msgspec.json.encode(key if len(key) <= 40 else f"{key[:40]}…").decode()
