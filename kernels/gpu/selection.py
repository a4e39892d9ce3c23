"""Whether Triton's kernels can run here: on a CUDA device, or on the CPU in the interpreter."""

import os
from importlib.util import find_spec

import torch

from kernels.config import KernelConfig
from kernels.ops import Kernels

# Compute capability from which on a device computes with fp8 (e4m3): Ada, Hopper.
_FP8_CAPABILITY = (8, 9)
_OLDEST_CAPABILITY = (8, 0)
INTERPRETED = "TRITON_INTERPRET"


def select_gpu_kernels(device: torch.device, config: KernelConfig) -> Kernels:
    """Triton's kernels on `device`; on the CPU that is a rehearsal of the GPU, slow but the same.

    Raises ValueError in one line for what cannot be had.
    """
    if config.implementation not in ("auto", "triton"):
        raise ValueError(f"there are no {config.implementation} kernels for device {device}")
    if config.activations != "auto":
        raise ValueError("a GPU's kernels do not round activations")
    if find_spec("triton") is None:
        raise ValueError("the GPU's kernels need the package triton, which is not installed")
    is_interpreted = os.environ.get(INTERPRETED, "") not in ("", "0")
    if device.type == "cuda":
        _check_device(device, config, is_interpreted)
    elif device.type != "cpu":
        raise ValueError(f"no kernels for device {device}")
    elif not is_interpreted:
        raise ValueError(
            f"on the CPU Triton's kernels run in its interpreter alone: set {INTERPRETED}=1"
        )
    # Here, since a CPU need not have triton, nor wait for it.
    from kernels.gpu.backend import GpuKernels

    return GpuKernels(device, config)


def _check_device(device: torch.device, config: KernelConfig, is_interpreted: bool) -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            f"there is no device {device}: this build of torch finds no GPU"
            if torch.version.cuda or torch.version.hip
            else f"there is no device {device}: this build of torch is for the CPU alone"
        )
    if is_interpreted:
        raise ValueError(f"with {INTERPRETED}=1 kernels run on the CPU: unset it for {device}")
    capability = torch.cuda.get_device_capability(device)
    is_amd = torch.version.hip is not None
    name = torch.cuda.get_device_name(device)
    if not is_amd and capability < _OLDEST_CAPABILITY:
        raise ValueError(
            f"{name} has compute capability {_dotted(capability)}; "
            f"bfloat16 needs {_dotted(_OLDEST_CAPABILITY)}"
        )
    # AMD's fp8 of the time is another type, without negative zero.
    if "fp8" in (config.weights, config.kv) and (is_amd or capability < _FP8_CAPABILITY):
        raise ValueError(f"{name} has no fp8 (e4m3)")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
