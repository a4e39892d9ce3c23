"""A rendered chat on its way to the encoder."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's text. `stand_ins` says for which character each stand-in in it stands."""

    text: str
    stand_ins: Mapping[str, str]
