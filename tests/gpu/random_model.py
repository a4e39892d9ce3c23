"""Models of random weights, made in the device's memory: no file is read, none is written."""

import math
import zlib
from collections.abc import Sequence, Set
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.weights import expected_shapes
from kernels import KernelConfig, StoredKind, StoredMatrix, select_kernels
from tests.gpu.machine import Machine

# As of tests/fakes/tiny_models.py: attention picks out tokens, the likeliest is clear of the next.
_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "v_proj": 2.0, "o_proj": 2.0}
_GAINS |= {"gate_proj": 2.0, "up_proj": 2.0, "down_proj": 2.0, "lm_head": 4.0}
_EMBEDDING = "embed_tokens"
_Q4_0_BYTES, _GROUP = 18, 32
# About what 4-bit codes between -8 and 7 spread over.
_CODE_SPREAD = 4.6


class RandomSource:
    """A `WeightSource` of the shapes of `config`; with `stored_as_4_bits` matrices are Q4_0.

    A tensor's numbers follow from its name.
    """

    path = Path("random weights")
    files: Sequence[Path] = ()

    def __init__(self, machine: Machine, config: ModelConfig, stored_as_4_bits: bool) -> None:
        self.config = config
        self._device = machine.torch_device
        self._is_4_bit = stored_as_4_bits
        self._shapes = expected_shapes(config)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        if len(shape) == 1:
            return values.normal_(1.0, 0.1, generator=generator)
        return values.normal_(0.0, self._spread(name, shape[1]), generator=generator)

    def stored(self, name: str, kinds: Set[StoredKind]) -> StoredMatrix | None:
        if not self._is_4_bit or StoredKind.Q4_0 not in kinds:
            return None
        rows, columns = self._shapes[name]
        row_bytes = columns // _GROUP * _Q4_0_BYTES
        # Rows of one piece of random memory, from another place for each matrix.
        num_rows = len(self._blocks) * _Q4_0_BYTES // row_bytes
        first = zlib.crc32(name.encode()) % max(1, num_rows - rows)
        data = self._blocks.reshape(-1)[first * row_bytes : (first + rows) * row_bytes]
        data = data.reshape(rows, row_bytes)
        if _EMBEDDING in name:
            return StoredMatrix(StoredKind.Q4_0, data, columns)
        scaled = data.reshape(rows, -1, _Q4_0_BYTES).copy()
        scale = np.array([self._spread(name, columns) / _CODE_SPREAD], np.float16)
        scaled[:, :, :2] = scale.view(np.uint8)
        return StoredMatrix(StoredKind.Q4_0, scaled.reshape(rows, row_bytes), columns)

    def rope_frequency_factors(self) -> Tensor | None:
        return None

    @cached_property
    def _blocks(self) -> np.ndarray:
        """uint8 [blocks, 18]: a scale of 1/4.6, and 32 random codes; enough for any matrix."""
        most = max(math.prod(shape) for shape in self._shapes.values())
        blocks = np.random.default_rng(0).integers(
            0, 256, (2 * most // _GROUP, _Q4_0_BYTES), dtype=np.uint8
        )
        blocks[:, :2] = np.array([1 / _CODE_SPREAD], np.float16).view(np.uint8)
        return blocks

    def _spread(self, name: str, columns: int) -> float:
        if _EMBEDDING in name:
            return 1.0
        return float(_GAINS[name.split(".")[-2]] * columns**-0.5)


def load_random(
    machine: Machine,
    config: ModelConfig,
    kernel_config: KernelConfig,
    executor_config: ExecutorConfig,
    *,
    stored_as_4_bits: bool = False,
) -> DeviceExecutor:
    """An executor of a device with random weights, its graphs captured."""
    source = RandomSource(machine, config, stored_as_4_bits)
    kernels = select_kernels(machine.torch_device, kernel_config)
    return DeviceExecutor.of_files(
        source, executor_config, machine.device(), kernels, report=lambda line: None
    )


def triton_config(**wanted: object) -> KernelConfig:
    return KernelConfig(implementation="triton", **wanted)  # type: ignore[arg-type]
