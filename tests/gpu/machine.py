"""The machine that a part runs on: its device, the shapes to run, how to time, its limits."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.compute.devices import CudaDevice, Device, HostDevice
from engine_svc.compute.model.config import LLAMA, ModelConfig, RopeConfig
from tests.bench.roofline import MODELS
from tests.bench.roofline_devices import DEVICES, DeviceFigures

LLAMA_8B = MODELS["llama-3.1-8b"]
TINY = ModelConfig(
    architecture=LLAMA,
    vocab_size=130,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_model_len=512,
    rope=RopeConfig(theta=10000.0),
    sliding_windows=(0, 0),
    tie_word_embeddings=False,
)
_COPIED_BYTES = 4 << 30
_MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Machine:
    """`torch_device` is a GPU, or the CPU for a rehearsal, where shapes are tiny."""

    torch_device: torch.device
    model: Path | None = None  # a GGUF file of SmolLM2, or another

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def config(self) -> ModelConfig:
        """Of the model that is measured: Llama-3.1-8B's shapes, or a tiny one's."""
        return LLAMA_8B if self.is_gpu else TINY

    def shortened(self, num_layers: int) -> ModelConfig:
        """As wide, with fewer layers."""
        return replace(self.config, num_layers=num_layers, sliding_windows=(0,) * num_layers)

    def device(self) -> Device:
        if self.is_gpu:
            return CudaDevice(self.torch_device)
        return HostDevice(checks_graphs=True)

    def tensors(self) -> AbstractContextManager[object]:
        """Inside, torch makes tensors on the device."""
        return self.torch_device if self.is_gpu else nullcontext()

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.torch_device).manual_seed(seed + len(shape))
        values = torch.randn(shape, generator=generator, device=self.torch_device)
        return values.to(dtype)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def seconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        """What the device takes for `call`, on the current stream: the median, after one run."""
        if not self.is_gpu:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        call()
        taken = []
        for _ in range(repeats):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            call()
            ended.record()
            ended.synchronize()
            taken.append(started.elapsed_time(ended) / 1e3)
        return statistics.median(taken)


def data_sheet(machine: Machine) -> DeviceFigures:
    """What the device's maker says; of an H200 where it is not known."""
    name = torch.cuda.get_device_name(machine.torch_device) if machine.is_gpu else ""
    for key in ("h200", "h100", "a100", "l40s", "l4", "4090", "mi300x"):
        if key in name.lower():
            return DEVICES["rtx4090" if key == "4090" else key]
    return DEVICES["h200"]


def measured_figures(machine: Machine) -> DeviceFigures:
    """What a large copy and a large product get of the device here, on random numbers."""
    num_bytes, size = (_COPIED_BYTES, _MATMUL_SIZE) if machine.is_gpu else (1 << 20, 64)
    pair = torch.randn(2, num_bytes // 4, device=machine.torch_device)
    copying = machine.seconds(lambda: pair[1].copy_(pair[0]))
    left, right = (machine.randn(size, size, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    out = torch.empty_like(left)
    multiplying = machine.seconds(lambda: torch.mm(left, right, out=out), repeats=20)
    return replace(
        data_sheet(machine),
        name="as measured",
        bytes_per_second=2 * num_bytes / copying,
        flops=2 * size**3 / multiplying,
    )
