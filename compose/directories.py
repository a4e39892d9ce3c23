"""Where Tokenline keeps files outside the repository: models, and what runs now."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/tokenline`, or `~/.cache/tokenline`."""
    base = environment.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "tokenline"


def models_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models lie; they are large, and worth keeping between versions."""
    return cache_directory(environment) / "models"


def state_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where each running line describes itself for `tokenline ps`; readable by this user only."""
    base = environment.get("XDG_RUNTIME_DIR", "")
    if base and Path(base).is_dir():
        return Path(base) / "tokenline"
    return cache_directory(environment) / "run"
