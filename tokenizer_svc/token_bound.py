"""The fewest tokens that a text can have, told from its characters without encoding it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

# How many characters of the text one character of the normalised text can come from. The canonical
# decomposition of a character has at most four, which NFC joins again.
_NORMALIZERS: Final = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
_PRE_TOKENIZERS: Final = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
_ALL_BYTES: Final = 256
_ASCII: Final = 0x80
# Those of which each character of UTF-8 has at least one: ASCII, and what continues a character.
_BYTES_OF_EVERY_CHARACTER: Final = 0xC0


@dataclass(frozen=True, slots=True)
class TokenBound:
    """`longest_token`: the most characters that one token stands for. `dropped`: the characters
    that no token stands for at all."""

    longest_token: int
    dropped: str = ""

    def fewest_tokens(self, text: str) -> int:
        """At least so many tokens has `text`."""
        num_dropped = sum(text.count(character) for character in self.dropped)
        return -(-(len(text) - num_dropped) // self.longest_token)


def token_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """The bound of a tokenizer; None for one that has none.

    There is none where a part of the tokenizer leaves characters out, or makes one token of any
    number of unknown ones, or where a token takes the white space around it along.
    """
    parts = json.loads(tokenizer.to_str())
    added = tokenizer.get_added_tokens_decoder().values()
    shrinking = _shrinking(parts["normalizer"])
    dropped = _dropped(parts["model"], _names(parts))
    if (
        shrinking is None
        or dropped is None
        or not _keeps_all(parts["pre_tokenizer"])
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    texts = (*tokenizer.get_vocab(with_added_tokens=False), *(token.content for token in added))
    return TokenBound(shrinking * max(map(len, texts), default=1), dropped)


def _shrinking(part: Mapping[str, Any] | None) -> int | None:
    if part is None:
        return 1
    if part["type"] == "Sequence":
        factor = 1
        for inner in part["normalizers"]:
            more = _shrinking(inner)
            if more is None:
                return None
            factor *= more
        return factor
    if part["type"] == "Replace":
        old = part["pattern"].get("String")
        return 1 if old and len(part["content"]) >= len(old) else None
    return _NORMALIZERS.get(part["type"], 1 if part["type"] == "ByteLevel" else None)


def _keeps_all(part: Mapping[str, Any] | None) -> bool:
    if part is None:
        return True
    if part["type"] == "Sequence":
        return all(map(_keeps_all, part["pretokenizers"]))
    if part["type"] in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return part["type"] in _PRE_TOKENIZERS


def _names(parts: Mapping[str, Any]) -> set[str]:
    """The types of the normalizers and pre-tokenizers."""
    found = set()
    waiting = [part for key in ("normalizer", "pre_tokenizer") if (part := parts[key])]
    while waiting:
        part = waiting.pop()
        found.add(part["type"])
        waiting += part.get("normalizers", []) + part.get("pretokenizers", [])
    return found


def _dropped(model: Mapping[str, Any], part_names: set[str]) -> str | None:
    """The characters that the model has no token for; None where they cannot be listed."""
    if model["type"] != "BPE":
        return None
    vocabulary = model["vocab"]
    if "ByteLevel" in part_names:
        missing = [
            byte
            for byte, character in enumerate(_byte_level_characters())
            if character not in vocabulary
        ]
        if model["unk_token"] is not None or any(byte >= _ASCII for byte in missing):
            return None if missing else ""
        return bytes(missing).decode("ascii")
    if model["byte_fallback"]:
        has_all = all(f"<0x{byte:02X}>" in vocabulary for byte in range(_ALL_BYTES))
        return "" if has_all else None
    return "" if model["unk_token"] is not None and not model["fuse_unk"] else None


def _byte_level_characters() -> list[str]:
    """How GPT-2's byte-level alphabet writes the bytes below 0xC0."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_ALL_BYTES) if byte not in printable]
    written = {byte: chr(byte) for byte in printable}
    written |= {byte: chr(_ALL_BYTES + index) for index, byte in enumerate(others)}
    return [written[byte] for byte in range(_BYTES_OF_EVERY_CHARACTER)]
