"""Reads a serialised decoder: what a token becomes by itself, and how the tokens are joined."""

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, decoders

from protos.wire.errors import StartupError

# A byte token, as u8::from_str_radix reads it (a sign counts as a digit's place).
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>", re.ASCII)


class Joining(enum.Enum):
    """How the decoder makes one text of many tokens."""

    # Bytes of all tokens, read as UTF-8 with U+FFFD for what is not.
    BYTE_LEVEL = "ByteLevel"
    # Texts, among them runs of byte tokens, which are text only if the whole run is UTF-8.
    BYTE_FALLBACK = "ByteFallback"
    # Texts.
    TEXT = "text"


@dataclass(frozen=True)
class DecoderSteps:
    """A decoder of the `tokenizers` library, taken apart.

    replacements: Replace steps, applied to each token alone, in order.
    first_token_drops: this character is a blank, except in the first token, which drops it; "" for
    no such rule.
    num_strip_left: so many `strip_content` characters at most are cut off the start of the text.
    """

    joining: Joining
    replacements: tuple[decoders.Decoder, ...] = ()
    first_token_drops: str = ""
    strip_content: str = ""
    num_strip_left: int = 0

    def text(self, token: str) -> str:
        """`token` after the steps that look at one token; not as the first of a text."""
        for replacement in self.replacements:
            token = replacement.decode([token])
        return token.replace(self.first_token_drops, " ") if self.first_token_drops else token


def read_decoder(document: Mapping[str, Any] | None) -> DecoderSteps:
    """Takes apart the "decoder" of a tokenizer.json; StartupError names what is not supported."""
    if document is None:
        raise StartupError("the tokenizer has no decoder")
    steps = list(_flatten(document))
    joining = Joining.TEXT
    replacements: list[decoders.Decoder] = []
    first_token_drops = strip_content = ""
    num_strip_left = 0
    # From here on, steps see the whole text.
    joined = False
    for step in steps:
        kind = step["type"]
        per_token = joining is Joining.TEXT and not joined
        if kind == "Replace" and per_token:
            replacements.append(_replace(step))
        elif kind == "Metaspace" and len(steps) == 1:
            if step["prepend_scheme"] == "never":
                replacements.append(decoders.Replace(step["replacement"], " "))
            else:
                first_token_drops = step["replacement"]
        elif kind == "ByteLevel" and per_token:
            joining, joined = Joining.BYTE_LEVEL, True
        elif kind == "ByteFallback" and per_token:
            joining = Joining.BYTE_FALLBACK
        elif kind == "Fuse":
            joined = True
        elif kind == "Strip" and joined and step["stop"] == 0 and num_strip_left == 0:
            strip_content, num_strip_left = step["content"], step["start"]
        else:
            names = ", ".join(other["type"] for other in steps)
            raise StartupError(f"the tokenizer's decoder is not supported: step {kind} of {names}")
    return DecoderSteps(
        joining, tuple(replacements), first_token_drops, strip_content, num_strip_left
    )


def byte_token_value(token: str) -> int | None:
    """The byte that a byte token such as `<0x0A>` stands for; None for other tokens."""
    match = _BYTE_TOKEN.fullmatch(token)
    return None if match is None else int(match[1], 16)


def byte_level_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for.

    GPT-2's table (Radford et al. 2019): printable characters of Latin-1 stand for their own byte,
    the characters from U+0100 on for the others in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


def _flatten(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if document["type"] == "Sequence":
        for step in document["decoders"]:
            yield from _flatten(step)
    else:
        yield document


def _replace(step: Mapping[str, Any]) -> decoders.Decoder:
    pattern = step["pattern"]
    return decoders.Replace(
        Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"], step["content"]
    )
