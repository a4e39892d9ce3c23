"""How much memory a step takes, and how much is free: of the machine, or of the container."""

from pathlib import Path

import psutil
import torch

from engine_svc.compute.model.config import ModelConfig
from kernels import Kernels

_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """The lesser of what the machine has available and what the container's limit leaves."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available  # not in a container with a limit of its own
    if limit == "max":
        return available
    return max(0, min(available, int(limit) - used))


def format_bytes(num_bytes: int) -> str:
    """`1.5 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def step_bytes(config: ModelConfig, kernels: Kernels, max_tokens: int, max_rows: int) -> int:
    """About what the largest step holds at once: a layer's activations, then the logits, of which
    choosing tokens takes a few copies."""
    per_token = 4 * (config.hidden_size + config.intermediate_size)
    per_token += 2 * (config.query_size + config.kv_size)
    logits = max_rows * config.vocab_size * torch.float32.itemsize
    return max_tokens * per_token * kernels.dtype.itemsize + kernels.num_logits_copies * logits


def rotary_bytes(config: ModelConfig, max_model_len: int) -> int:
    """What the table of rotary angles takes while it is made: seven halves of it at once."""
    return 7 * (config.head_dim // 2) * max_model_len * torch.float32.itemsize
