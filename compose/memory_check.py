"""Refuses a model that cannot fit into this machine."""

from pathlib import Path

import psutil

from compose.errors import CommandError


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
