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
    if "fp8" in (config.weights, config.kv):
        raise ValueError("the CPU's kernels do not compute with fp8")
    if config.implementation == "torch":
        return _torch_kernels(config)
    try:
        runnable = library.runnable()
        reason = "" if runnable else "the native library is not built"
    except OSError as error:
        runnable, reason = [], str(error)
    if config.implementation == "auto":
        if runnable:
            return _native_kernels(config, runnable[-1])
        kernels = _torch_kernels(config)
        kernels.description += f", several times slower than native ones: {reason}"
        return kernels
    if not runnable:
        raise ValueError(f"there are no {config.implementation} kernels: {reason}")
    if config.implementation not in runnable:
        raise ValueError(
            f"there are no {config.implementation} kernels for this machine, "
            f"only {', '.join(runnable)}"
        )
    return _native_kernels(config, config.implementation)


def _native_kernels(config: KernelConfig, build: str) -> NativeKernels:
    kv = config.kv
    if kv == "auto":
        kv = "float32" if config.weights == "float32" else "float16"
    elif kv == "bfloat16":
        raise ValueError("the native kernels hold KV in float16, float32 or int8")
    activations = config.activations
    if config.weights in ("float32", "bfloat16"):
        if activations != "auto":
            raise ValueError(f"beside {config.weights} weights activations are not rounded")
        activations = "float32"
    elif activations == "auto":
        activations = "int8"
    return NativeKernels(library.load(build), config.num_threads, config.weights, activations, kv)


def _torch_kernels(config: KernelConfig) -> CpuKernels:
    dtype = _TORCH_DTYPES.get(config.weights)
    if config.activations != "auto":
        raise ValueError("torch's own kernels do not round activations")
    if dtype is None:
        raise ValueError(f"torch's own kernels do not compute with {config.weights} weights")
    if config.kv not in ("auto", str(dtype).removeprefix("torch.")):
        raise ValueError("torch's own kernels hold KV in the type of the weights")
    return CpuKernels(dtype)
