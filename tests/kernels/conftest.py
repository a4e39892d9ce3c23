"""Each build of the native library that this machine can run, opened once."""

from collections.abc import Iterator

import numpy as np
import pytest

from kernels.cpu.library import runnable
from tests.fakes.native_linear import Native, open_native

BUILDS = runnable()


@pytest.fixture(scope="module")
def natives() -> Iterator[dict[str, Native]]:
    opened = {name: open_native(name) for name in BUILDS}
    yield opened
    for native in opened.values():
        native.library.tl_pool_delete(native.pool)


@pytest.fixture(params=BUILDS)
def native(request: pytest.FixtureRequest, natives: dict[str, Native]) -> Native:
    return natives[request.param]


@pytest.fixture(params=[1, 2], ids=["int8", "int16"])
def halves(request: pytest.FixtureRequest) -> int:
    """Of quantised activations."""
    result: int = request.param
    return result


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)
