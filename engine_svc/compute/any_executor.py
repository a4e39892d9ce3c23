"""Which executor runs a model: that of a device, or that of the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.devices import CudaDevice, HostDevice
from engine_svc.compute.executor import Executor, num_threads_of
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.loading import chosen_kernels
from engine_svc.compute.ranks import ONE_RANK, Ranks
from protos.wire.errors import StartupError

AnyExecutor = Executor | DeviceExecutor

_REHEARSED = "triton"
_OF_RANKS = "torch"


def load_executor(
    model: Path, config: ExecutorConfig, report: Callable[[str], None], ranks: Ranks = ONE_RANK
) -> AnyExecutor:
    """Loads an HF directory or a GGUF file, or a rank's share of it.

    `report` gets a line now and then. StartupError says in one line what is wrong with the model,
    or what this machine lacks for it. With the kernels "triton" on the CPU, all that a device does
    is rehearsed there, and its graphs are checked.
    """
    config = config_of_ranks(config, ranks.size)
    torch_device = device_of_rank(config, ranks.rank)
    is_cuda = torch_device.type == "cuda"
    if not is_cuda and config.cpu_kernels != _REHEARSED:
        return Executor.load(model, config, report, ranks)
    num_threads = num_threads_of(config, ranks.size)
    kernels = chosen_kernels(config, torch_device, num_threads)
    torch.set_num_threads(num_threads)
    device = CudaDevice(torch_device) if is_cuda else HostDevice(checks_graphs=True)
    try:
        return DeviceExecutor.load(model, config, device, kernels, report, num_threads, ranks)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise StartupError(
            f"not enough memory on {torch_device} for the model and its largest step: {reason}"
        ) from error


def device_of_rank(config: ExecutorConfig, rank: int) -> torch.device:
    """Where a rank computes."""
    is_cuda = config.device == "cuda" or (
        config.device == "auto" and config.cpu_kernels == "auto" and torch.cuda.is_available()
    )
    return torch.device("cuda", rank) if is_cuda else torch.device("cpu")


def config_of_ranks(config: ExecutorConfig, num_ranks: int) -> ExecutorConfig:
    """The config for so many ranks. StartupError where that cannot be."""
    if num_ranks == 1:
        return config
    if device_of_rank(config, 0).type == "cuda":
        num_devices = torch.cuda.device_count()
        if num_ranks > num_devices:
            raise StartupError(
                f"--tensor-parallel {num_ranks} needs as many devices, and there are {num_devices}"
            )
        return config
    if config.cpu_kernels not in ("auto", _OF_RANKS):
        raise StartupError(
            f"--tensor-parallel {num_ranks} needs --cpu-kernels {_OF_RANKS} on the CPU: those for "
            "an instruction set compute a step as one, so they cannot add up what ranks have"
        )
    # Named, so that no rank takes it for leave to choose a device.
    return replace(config, device="cpu", cpu_kernels=_OF_RANKS)
