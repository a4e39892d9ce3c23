"""The public ops: one interface, `Kernels`, and the backend that `select_kernels` picks for it."""

import torch

from kernels.config import KernelConfig
from kernels.cpu.selection import select_cpu_kernels
from kernels.gpu.selection import select_gpu_kernels
from kernels.ops import (
    GREEDY_TEMPERATURE,
    AttentionPlan,
    CapturedRun,
    Kernels,
    KvCache,
    KvLayer,
    PackedEmbedding,
    PackedLinear,
    StoredKind,
    StoredMatrix,
)

__all__ = [
    "GREEDY_TEMPERATURE",
    "AttentionPlan",
    "CapturedRun",
    "KernelConfig",
    "Kernels",
    "KvCache",
    "KvLayer",
    "PackedEmbedding",
    "PackedLinear",
    "StoredKind",
    "StoredMatrix",
    "select_kernels",
]


def select_kernels(device: torch.device, config: KernelConfig | None = None) -> Kernels:
    """The backend for tensors on `device`; chosen once, when a model is loaded.

    Raises ValueError for what this machine or this build does not have.
    """
    config = config or KernelConfig()
    if device.type == "cuda" or config.implementation == "triton":
        return select_gpu_kernels(device, config)
    if device.type != "cpu":
        raise ValueError(f"no kernels for device {device}")
    return select_cpu_kernels(config)
