"""Memory that runs out in the native library: told as an error, and nothing is worse afterwards."""

from pathlib import Path

import pytest
import torch

from kernels.cpu.build import library_path
from kernels.cpu.library import load, runnable
from tests.fakes.native_drivers import DRIVERS, compile_driver, run_driver
from tests.fakes.native_ops import open_sampling

# More floats than there are addresses.
ABSURD = 1 << 56


@pytest.fixture
def name() -> str:
    if not runnable():
        pytest.skip("there is no native library")
    return runnable()[-1]


def test_each_allocation_of_the_library_may_fail(tmp_path: Path, name: str) -> None:
    driver = compile_driver(
        tmp_path / "memory", [DRIVERS / "memory_driver.cpp", library_path(name)], ("-rdynamic",)
    )
    run_driver(driver, 1)


@pytest.mark.parametrize("name", runnable())
def test_no_memory_to_sample_is_a_memory_error_and_the_next_call_is_as_ever(name: str) -> None:
    library = load(name)
    with open_sampling(name, 2) as sampling:
        pool, place = sampling._pool, torch.zeros(8).data_ptr()
        with pytest.raises(MemoryError, match="memory ran out in tl_token_logprobs of the native"):
            library.tl_token_logprobs(pool, place, 0, ABSURD, 1, *(place, 0, place, place, place))
        chosen, _, _ = sampling.token_logprobs(torch.zeros(1, 4), torch.tensor([2]), 1)
        assert chosen.item() == pytest.approx(-torch.tensor(4.0).log().item())


def test_no_memory_to_pack_is_a_memory_error(name: str) -> None:
    source = torch.zeros(8)
    with pytest.raises(MemoryError, match="memory ran out in tl_pack of the native CPU kernels"):
        load(name).tl_pack(5, 0, source.data_ptr(), 0, None, 0, 1, 1, ABSURD, source.data_ptr())
