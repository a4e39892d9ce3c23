"""Which implementation computes on this CPU: a native build, or torch's own ops."""

import torch

from kernels.config import KernelConfig
from kernels.cpu import library
from kernels.cpu.backend import CpuKernels
from kernels.cpu.native_backend import NativeKernels
from kernels.ops import Kernels

_TORCH_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


def select_cpu_kernels(config: KernelConfig) -> Kernels:
    """Raises ValueError in one line for what cannot be had."""
    build = library.best()
    if config.implementation == "torch" or (config.implementation == "auto" and build is None):
        return _torch_kernels(config, is_left=config.implementation == "auto")
    if build is None:
        raise ValueError(
            f"there are no {config.implementation} kernels: the native library is not built"
        )
    if config.implementation != "auto":
        built = library.available()
        usable = built[: built.index(build) + 1]
        if config.implementation not in usable:
            raise ValueError(
                f"there are no {config.implementation} kernels for this machine, "
                f"only {', '.join(usable)}"
            )
        build = config.implementation
    kv = config.kv
    if kv == "auto":
        kv = "float32" if config.weights == "float32" else "float16"
    return NativeKernels(library.load(build), config.num_threads, config.weights, kv)


def _torch_kernels(config: KernelConfig, is_left: bool) -> CpuKernels:
    """`is_left` when there was nothing better."""
    dtype = _TORCH_DTYPES.get(config.weights)
    if dtype is None:
        raise ValueError(f"torch's own kernels do not compute with {config.weights} weights")
    if config.kv not in ("auto", str(dtype).removeprefix("torch.")):
        raise ValueError("torch's own kernels hold KV in the type of the weights")
    kernels = CpuKernels(dtype)
    if is_left:
        kernels.description += ", since the native library is not built: several times slower"
    return kernels
