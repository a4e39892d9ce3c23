"""What tests of the GPU's kernels share: tolerances, caches as floats, launches overheard."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import mangle_type

from kernels.gpu.kv_cache import GpuKvLayer
from kernels.gpu.variant import Variant

# Relative to the largest value of the reference. A result in 16 bits is rounded once; the
# interpreter cuts bfloat16 off where a device rounds, which is twice as far.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs().max()
    assert difference <= TOLERANCE[actual.dtype] * max(1.0, float(expected.double().abs().max()))


def read_cache(kv_layer: GpuKvLayer) -> Tensor:
    """Keys and values as attention reads them, float64 [2, blocks, block_size, kv_heads, dim]."""
    data = kv_layer.data.double()
    return data if kv_layer.scales is None else data * kv_layer.scales.double()[..., None]


class Launches:
    """Stands in for a kernel, and notes what it is launched with."""

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.seen: list[Mapping[str, Any]] = []

    def __getitem__(self, grid: object) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            named = dict(zip(self.arg_names, args, strict=False))
            self.seen.append({**named, **kwargs})

        return launch


def overhear(monkeypatch: pytest.MonkeyPatch, module: object, kernel: str) -> Launches:
    launches = Launches(getattr(module, kernel).arg_names)
    monkeypatch.setattr(module, kernel, launches)
    return launches


def assert_launched_as_compiled(launched: Mapping[str, Any], variant: Variant) -> None:
    """What was launched has the values and the types that were compiled ahead."""
    assert launched.keys() - {"num_warps"} == variant.signature.keys() | variant.constexprs.keys()
    assert launched["num_warps"] == variant.num_warps
    for name, value in variant.constexprs.items():
        assert launched[name] == value and type(launched[name]) is type(value), name
    for name, kind in variant.signature.items():
        value = launched[name]
        assert isinstance(value, Tensor) == kind.startswith("*"), name
        if name in variant.divisible_by_16:
            assert value % 16 == 0, name
        if isinstance(value, Tensor):
            assert kind == mangle_type(value), name
            assert value.data_ptr() % 16 == 0, name
