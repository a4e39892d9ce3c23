"""The public ops: one interface, `Kernels`, and the backend that `select_kernels` picks for it."""

import torch

from kernels.cpu.backend import CpuKernels
from kernels.ops import AttentionPlan, Kernels, PackedLinear, StoredKind, StoredMatrix

__all__ = [
    "AttentionPlan",
    "Kernels",
    "PackedLinear",
    "StoredKind",
    "StoredMatrix",
    "select_kernels",
]


def select_kernels(device: torch.device) -> Kernels:
    """The backend for tensors on `device`; chosen once, when a model is loaded."""
    if device.type != "cpu":
        raise ValueError(f"no kernels for device {device}")
    return CpuKernels()
