"""What a model's files ask for where a request leaves sampling unsaid."""

from collections.abc import Mapping
from typing import Any, Final

from protos.wire.errors import StartupError
from protos.wire.sampling_range import LARGEST, SMALLEST_DIVISOR

# The fields of protos.tokenizer.v1.GenerationDefaults with the range each must be in.
_RANGES: Final = {
    "temperature": (0.0, LARGEST),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (SMALLEST_DIVISOR, LARGEST),
    "max_new_tokens": (1, (1 << 32) - 1),
}
_WHOLE: Final = frozenset({"top_k", "max_new_tokens"})


def generation_defaults(config: Mapping[str, Any], source: str) -> dict[str, float]:
    """The fields of GenerationDefaults that `config`, from the file `source`, sets.

    `do_sample` is not read, as in vLLM: many files leave it out beside a temperature that they
    mean, and a request that says `temperature: 0` is greedy anyway. A top_k of -1 is 0, which is
    off. Raises StartupError for a value that is no number or out of range.
    """
    defaults: dict[str, float] = {}
    for name, (least, most) in _RANGES.items():
        value = config.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (name in _WHOLE and value != int(value)):
            raise StartupError(f"{source} sets {name} to {value!r}, which is not usable")
        defaults[name] = max(0, int(value)) if name in _WHOLE else float(value)
    return defaults
