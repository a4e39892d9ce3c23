"""How many KV blocks a device gets beside what the largest step was seen to take."""

import pytest

from engine_svc.compute.device_memory import (
    bytes_for_kv,
    max_graph_bytes,
    num_device_blocks,
)
from engine_svc.compute.devices import DeviceMemory
from protos.wire.errors import StartupError

GIB = 1 << 30
# 2 GiB are taken by others; at its largest the engine took 25 GiB, 5 of them a cache to measure by.
MEMORY = DeviceMemory(total=100 * GIB, free=68 * GIB, reserved=30 * GIB, peak=25 * GIB)
TAKEN = 2 * GIB + 20 * GIB


def test_the_cache_gets_what_the_share_leaves() -> None:
    assert bytes_for_kv(MEMORY, 5 * GIB) == 90 * GIB - TAKEN
    assert num_device_blocks(MEMORY, 5 * GIB, 0, GIB, 1000) == 90 - 22
    assert num_device_blocks(MEMORY, 5 * GIB, 0, GIB, 7) == 7
    assert num_device_blocks(MEMORY, 5 * GIB, 10 * GIB, GIB, 7) == 10
    # Who says how much may go beyond the share, up to all there is.
    assert num_device_blocks(MEMORY, 5 * GIB, 78 * GIB, GIB, 7) == 78


@pytest.mark.parametrize(
    ("wanted", "block_bytes", "message"),
    [
        (79 * GIB, GIB, "22 GiB are taken by the model, .* 79 GiB are needed for the KV cache"),
        (0, 70 * GIB, "70 GiB are needed"),
        (GIB // 2, GIB, "given 512 MiB, but one block takes 1 GiB"),
    ],
)
def test_what_does_not_fit_is_refused(wanted: int, block_bytes: int, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        num_device_blocks(MEMORY, 5 * GIB, wanted, block_bytes, 1000)


def test_graphs_are_bounded_by_what_is_free() -> None:
    assert max_graph_bytes(100 * GIB) == 2 * GIB
    assert max_graph_bytes(GIB) == GIB // 2
    assert max_graph_bytes(0) == 0
