"""Reads numbers out of a model's file: each of the right kind and in a range that makes sense."""

import math
from collections.abc import Mapping
from typing import Any, Final

from protos.wire.errors import StartupError

# The most of each that is taken for a model and not for damage: far above what is published, and
# low enough that nothing sized by it alone fills the memory. Positions are float32 in the table of
# rotary angles, where whole numbers end at 2^24.
_MOST: Final[Mapping[str, int]] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 1 << 12,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 12,
    "max_model_len": 1 << 24,
    "original_max_position": 1 << 24,
}
_MOST_WINDOW: Final = (1 << 31) - 1
_SMALLEST, _LARGEST = 1e-9, 1e12


def size(name: str, value: Any) -> int:
    """`value` as the size `name` of a ModelConfig: at least 1. Raises StartupError."""
    return _whole(name, value, 1, _MOST[name])


def window(value: Any) -> int:
    """`value` as tokens of a sliding window; 0 for none. Raises StartupError."""
    return _whole("sliding_window", 0 if value is None else value, 0, _MOST_WINDOW)


def number(name: str, value: Any) -> float:
    """`value` as a positive number of a usual magnitude. Raises StartupError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_kind(name, value, "a number")
    if not _SMALLEST <= value <= _LARGEST:
        raise StartupError(f"the model's {name} is {value:.6g}, which cannot be served")
    return float(value)


def first_given(*values: Any) -> Any:
    """The first of `values` that is not None; the last one is a default."""
    return next(value for value in values if value is not None)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value != int(value):
        raise _wrong_kind(name, value, "a whole number")
    if not least <= value <= most:
        raise StartupError(
            f"the model's {name} is {int(value)}; expected is a number from {least} to {most}"
        )
    return int(value)


def _wrong_kind(name: str, value: Any, expected: str) -> StartupError:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
    return StartupError(
        f"the model's {name} holds a value of the wrong kind: {shown} is not {expected}"
    )
