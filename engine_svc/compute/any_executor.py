"""Which executor runs a model: that of a device, or that of the CPU."""

from collections.abc import Callable
from pathlib import Path

import torch

from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.devices import CudaDevice, HostDevice
from engine_svc.compute.executor import Executor, num_threads_of
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.loading import chosen_kernels

_REHEARSED = "triton"


def load_executor(
    model: Path, config: ExecutorConfig, report: Callable[[str], None]
) -> Executor | DeviceExecutor:
    """Loads an HF directory or a GGUF file.

    `report` gets a line now and then. StartupError says in one line what is wrong with the model,
    or what this machine lacks for it. With the kernels "triton" on the CPU, all that a device does
    is rehearsed there, and its graphs are checked.
    """
    is_cuda = config.device == "cuda" or (
        config.device == "auto" and config.cpu_kernels == "auto" and torch.cuda.is_available()
    )
    if not is_cuda and config.cpu_kernels != _REHEARSED:
        return Executor.load(model, config, report)
    torch_device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    num_threads = num_threads_of(config)
    kernels = chosen_kernels(config, torch_device, num_threads)
    torch.set_num_threads(num_threads)
    device = CudaDevice(torch_device) if is_cuda else HostDevice(checks_graphs=True)
    return DeviceExecutor.load(model, config, device, kernels, report, num_threads)
