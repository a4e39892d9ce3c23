"""Linear layers of every weight format at a model's own shapes, and bits that no batch changes."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from kernels import KernelConfig, Kernels, PackedLinear, StoredKind, StoredMatrix, select_kernels
from kernels.gpu.stored_blocks import fp8_codes
from tests.gpu.machine import Machine
from tests.gpu.random_model import triton_config
from tests.gpu.records import Recorder

# Of Σ |x| |w|: weights and results in bfloat16, sums in float32.
ROUNDED = 2**-7
GROUP = 32
# A layer's weight, and the same as floats.
Layer = tuple[PackedLinear, Tensor]
CONFIGS = {
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "int8": "int8",
    "q4_0": "auto",
    "q4_1": "auto",
    "q8_0": "auto",
}


def check_linear(machine: Machine, recorder: Recorder) -> None:
    for name in CONFIGS:
        kernels = _kernels(machine, name, False)
        for outputs, columns in _shapes(machine):
            shape = f"{outputs} x {columns}"
            with recorder.case(f"{name}, {shape}"):
                packed, weight = _layer(machine, kernels, name, outputs, columns)
                for rows in (1, 5, 16, 40, 200, 1024) if machine.is_gpu else (1, 17):
                    with recorder.case(f"{name}, {rows} rows, {shape}", is_check=True):
                        x = machine.randn(rows, columns, dtype=torch.bfloat16)
                        _assert_product(kernels.linear(x, packed), x, weight)
    with recorder.case("logits in float32", is_check=True):
        kernels = _kernels(machine, "bfloat16", False)
        packed, weight = _layer(machine, kernels, "bfloat16", *_shapes(machine)[0])
        x = machine.randn(3, weight.shape[1], dtype=torch.bfloat16)
        logits = kernels.logits(x, packed)
        assert logits.dtype == torch.float32
        _assert_product(logits, x, weight)


def check_invariant_linear(machine: Machine, recorder: Recorder) -> None:
    """Batch-invariant mode: right, and each row with the same bits in any batch."""
    sizes = (1, 7, 64, 65, 300) if machine.is_gpu else (1, 5)
    for name in CONFIGS:
        kernels = _kernels(machine, name, True)
        for outputs, columns in _shapes(machine):
            shape = f"{outputs} x {columns}"
            with recorder.case(f"{name}, {shape}: the same bits in any batch", is_check=True):
                packed, weight = _layer(machine, kernels, name, outputs, columns)
                x = machine.randn(sizes[-1], columns, dtype=torch.bfloat16)
                whole = kernels.linear(x, packed).clone()
                _assert_product(whole, x, weight)
                for size in sizes[:-1]:
                    for first in (0, len(x) - size):
                        rows = slice(first, first + size)
                        assert torch.equal(kernels.linear(x[rows], packed), whole[rows]), size


def _shapes(machine: Machine) -> list[tuple[int, int]]:
    """Of a fused projection and of the way down."""
    config = machine.config
    fused = config.query_size + 2 * config.kv_size
    return [(fused, config.hidden_size), (config.hidden_size, config.intermediate_size)]


def _kernels(machine: Machine, name: str, is_invariant: bool) -> Kernels:
    config: KernelConfig = triton_config(weights=CONFIGS[name], batch_invariant=is_invariant)
    return select_kernels(machine.torch_device, config)


def _assert_product(actual: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = x.double() @ weight.double().T
    magnitudes = x.double().abs() @ weight.double().abs().T
    worst = float(((actual.double() - expected).abs() / magnitudes).max())
    assert worst <= ROUNDED, f"off by {worst:.2e} of the magnitudes"


def _layer(machine: Machine, kernels: Kernels, name: str, outputs: int, columns: int) -> Layer:
    if name in _STORED:
        kind, read = _STORED[name]
        data, floats = read(outputs, columns // GROUP)
        stored = StoredMatrix(kind, data.reshape(outputs, -1), columns)
        return kernels.pack_linear([stored]), floats.to(machine.torch_device)
    weight = machine.randn(outputs, columns)
    if name == "bfloat16":
        weight = weight.bfloat16()
    packed = kernels.pack_linear([weight])
    if name == "fp8":
        codes, scales = fp8_codes(weight).read(0, outputs, machine.torch_device)
        weight = codes.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    elif name == "int8":
        groups = weight.unflatten(1, (-1, GROUP))
        scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
        weight = ((groups / scales).round().clamp(-127, 127) * scales).flatten(1)
    return packed, weight


def _numbers(rows: int, groups: int, num_bytes: int) -> Iterator[np.ndarray]:
    """Scales float16 [rows, groups, 1] twice, and random bytes [rows, groups, num_bytes]."""
    generator = np.random.default_rng(0)
    for _ in range(2):
        yield generator.uniform(0.01, 0.1, (rows, groups, 1)).astype(np.float16)
    yield generator.integers(0, 256, (rows, groups, num_bytes), dtype=np.uint8)


def _as_bytes(scales: np.ndarray) -> np.ndarray:
    return scales.view(np.uint8)


def _q4(rows: int, groups: int, has_minimum: bool) -> tuple[np.ndarray, Tensor]:
    """Blocks as files have them: element j in the low half of byte j, j + 16 in the high half."""
    scales, minima, codes = _numbers(rows, groups, 16)
    values = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float32)
    if has_minimum:
        floats = values * scales.astype(np.float32) + minima.astype(np.float32)
        parts = [_as_bytes(scales), _as_bytes(minima), codes]
    else:
        floats = (values - 8) * scales.astype(np.float32)
        parts = [_as_bytes(scales), codes]
    return np.concatenate(parts, axis=-1), torch.from_numpy(floats).flatten(1)


def _q8(rows: int, groups: int) -> tuple[np.ndarray, Tensor]:
    scales, _, codes = _numbers(rows, groups, GROUP)
    floats = codes.view(np.int8).astype(np.float32) * scales.astype(np.float32)
    return np.concatenate([_as_bytes(scales), codes], -1), torch.from_numpy(floats).flatten(1)


_STORED: dict[str, tuple[StoredKind, Callable[[int, int], tuple[np.ndarray, Tensor]]]] = {
    "q4_0": (StoredKind.Q4_0, lambda rows, groups: _q4(rows, groups, False)),
    "q4_1": (StoredKind.Q4_1, lambda rows, groups: _q4(rows, groups, True)),
    "q8_0": (StoredKind.Q8_0, _q8),
}
