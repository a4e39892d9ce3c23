"""Several engines share the machine; one has it alone."""

import os

import psutil
import pytest

from compose.machine_share import engine_share


def test_an_engine_alone_decides_for_itself() -> None:
    assert engine_share(1) == {}


@pytest.mark.parametrize("num_engines", [2, 3, 100])
def test_engines_together_take_no_more_than_there_is(num_engines: int) -> None:
    share = engine_share(num_engines)
    assert share["--num-threads"] >= 1
    assert share["--num-threads"] * num_engines <= max(os.cpu_count() or 1, num_engines)
    assert 0 < share["--kv-memory"] * num_engines < psutil.virtual_memory().total
