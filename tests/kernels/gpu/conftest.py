"""Tensors for tests of the GPU's kernels, on a GPU where there is one, else for the interpreter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.reference import ReferenceKernels
from tests.fakes.quick_interpreter import hurry


@pytest.fixture(autouse=True)
def _quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def reference() -> ReferenceKernels:
    return ReferenceKernels()


@pytest.fixture
def randn(device: torch.device) -> Callable[..., Tensor]:
    """Draws normal numbers of a shape and a dtype, the same ones in every run."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return draw
