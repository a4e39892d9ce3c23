"""Which implementation computes on this CPU: a native build, or torch's own ops."""

import torch

from kernels.config import KernelConfig
from kernels.cpu.backend import CpuKernels
from kernels.ops import Kernels

_TORCH_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


def select_cpu_kernels(config: KernelConfig) -> Kernels:
    """Raises ValueError in one line for what cannot be had."""
    if config.implementation not in ("auto", "torch"):
        raise ValueError(f"there are no {config.implementation} kernels")
    return _torch_kernels(config)


def _torch_kernels(config: KernelConfig) -> CpuKernels:
    dtype = _TORCH_DTYPES.get(config.weights)
    if dtype is None:
        raise ValueError(f"torch's own kernels do not compute with {config.weights} weights")
    if config.kv not in ("auto", config.weights) and config.kv != str(dtype)[6:]:
        raise ValueError("torch's own kernels hold KV in the type of the weights")
    return CpuKernels(dtype)
