"""Divides this machine between the engines of a line, and refuses what cannot fit."""

import os
from pathlib import Path
from typing import Final

import psutil

from compose.errors import CommandError

# Of the memory that is free; the weights and the rest of the line take theirs beside it.
_KV_SHARE_OF_ALL_ENGINES: Final = 0.5


def engine_share(num_engines: int) -> dict[str, int]:
    """Settings of each of `num_engines` where none are given; none for an engine alone.

    An engine takes every core and a share of the free memory for itself: several that start
    together would take too much.
    """
    if num_engines == 1:
        return {}
    available = psutil.virtual_memory().available
    return {
        "--num-threads": max(1, (os.cpu_count() or 1) // num_engines),
        "--kv-memory": int(available * _KV_SHARE_OF_ALL_ENGINES / num_engines),
    }


def require_memory(model_path: Path, num_engines: int) -> None:
    """Raises CommandError when the weights alone are over what is free."""
    files = model_path.glob("*.safetensors") if model_path.is_dir() else [model_path]
    needed = sum(file.stat().st_size for file in files) * num_engines
    available = psutil.virtual_memory().available
    if needed > available:
        engines = "1 engine" if num_engines == 1 else f"{num_engines} engines"
        raise CommandError(
            f"not enough memory: the weights take {needed / 1e9:.1f} GB in {engines}, "
            f"{available / 1e9:.1f} GB are free; take a smaller model, or stop other programs"
        )
