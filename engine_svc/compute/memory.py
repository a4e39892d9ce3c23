"""How many KV blocks there is room for, by what a step takes and what is free on this machine."""

from pathlib import Path

import psutil
import torch

from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.kv_storage import kv_block_bytes
from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.weights import WeightSource, weight_bytes
from kernels import Kernels
from protos.wire.errors import StartupError

# Of the memory left beside the model, what the KV caches of a machine's engines take when not told:
# the rest of the line, and other programs, need some too.
_KV_SHARE = 0.3
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


def kv_cache_line(num_blocks: int, block_size: int, block_bytes: int, num_ranks: int) -> str:
    """What the log tells of the KV cache; block_bytes: of a rank."""
    of_rank = f" in each of {num_ranks} ranks" if num_ranks > 1 else ""
    num_bytes = format_bytes(num_blocks * block_bytes)
    return f"KV cache: {num_blocks} blocks of {block_size} tokens, {num_bytes}{of_rank}"


def num_host_blocks(
    config: ExecutorConfig,
    source: WeightSource,
    kernels: Kernels,
    max_model_len: int,
    num_ranks: int = 1,
) -> int:
    """How many KV blocks there is room for beside the weights. StartupError for none.

    Several ranks share the memory equally; `source` is one's share of the model.
    """
    model_config = source.config
    block_bytes = kv_block_bytes(kernels, model_config, config.block_size)
    model_bytes = weight_bytes(source, kernels, kernels.dtype) + step_bytes(
        model_config, kernels, config.max_num_batched_tokens, config.max_logit_rows
    )
    model_bytes += rotary_bytes(model_config, max_model_len)
    free = free_memory_bytes() // num_ranks
    share = _KV_SHARE / config.num_local_engines
    kv_bytes = config.kv_memory_bytes // num_ranks or int(max(0, free - model_bytes) * share)
    needed = model_bytes + max(kv_bytes, block_bytes)
    if needed > free:
        raise StartupError(
            f"not enough memory: {format_bytes(model_bytes)} for the model and "
            f"{format_bytes(needed - model_bytes)} for the KV cache are needed, "
            f"{format_bytes(free)} are free"
        )
    num_blocks = kv_bytes // block_bytes
    if not num_blocks:
        raise StartupError(
            f"the KV cache is given {format_bytes(kv_bytes)}, "
            f"but one block takes {format_bytes(block_bytes)}: give it more with --kv-memory"
        )
    if config.kv_memory_bytes:
        return num_blocks
    most_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    return min(num_blocks, most_useful)
