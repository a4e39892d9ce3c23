"""Which kernels are chosen on this machine, and what is said where others were wanted."""

import pytest
import torch

from kernels import KernelConfig, Kernels, select_kernels
from kernels.cpu import library
from kernels.cpu.library import runnable


def select(**wanted: str) -> Kernels:
    return select_kernels(torch.device("cpu"), KernelConfig(**wanted))


@pytest.mark.skipif(not runnable(), reason="there is no library")
def test_the_best_build_computes_unless_told() -> None:
    builds = runnable()
    assert select().description == (
        f"native CPU kernels: {builds[-1]}, threads: 1, "
        "weights: auto, activations: int8, KV: float16"
    )
    for build in builds:
        description = select(implementation=build, weights="float32").description
        assert description.startswith(f"native CPU kernels: {build},")
        assert description.endswith("weights: float32, activations: float32, KV: float32")
    assert "activations: int16" in select(activations="int16").description
    with pytest.raises(ValueError, match="beside float32 weights activations are not rounded"):
        select(weights="float32", activations="int16")
    with pytest.raises(ValueError, match="there are no neon kernels for this machine"):
        select(implementation="neon")


@pytest.mark.parametrize(("built", "reason"), [(True, "old: make native"), (False, "is not built")])
def test_without_a_library_torch_computes_and_says_why(
    monkeypatch: pytest.MonkeyPatch, built: bool, reason: str
) -> None:
    def runnable() -> list[str]:
        if built:
            raise OSError("the library is old: make native")
        return []

    monkeypatch.setattr(library, "runnable", runnable)
    kernels = select()
    assert kernels.dtype == torch.float32
    assert kernels.description.startswith(
        "torch's own CPU kernels in float32, several times slower"
    )
    assert kernels.description.endswith(reason)
    with pytest.raises(ValueError, match=f"no portable kernels: .*{reason}"):
        select(implementation="portable")
    with pytest.raises(ValueError, match="do not round activations"):
        select(activations="int16")
    with pytest.raises(ValueError, match="do not compute with int8 weights"):
        select(weights="int8")


def test_torch_can_be_told() -> None:
    assert select(implementation="torch").description == "torch's own CPU kernels in float32"
    kernels = select(implementation="torch", weights="bfloat16", kv="bfloat16")
    assert kernels.dtype == torch.bfloat16
