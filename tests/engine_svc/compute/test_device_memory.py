"""How many KV blocks a device gets beside what the largest step was seen to take."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.device_memory import (
    bytes_for_kv,
    max_graph_bytes,
    num_device_blocks,
)
from engine_svc.compute.devices import DeviceMemory, HostDevice, StepGraph
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.planning.step import SamplingParameters
from protos.wire.errors import StartupError
from tests.fakes.decoding import ExecutorRows, load_tiny_executor
from tests.fakes.device_decoding import PaddedCpuKernels
from tests.fakes.tiny_models import write_tiny_llama

MIB, GIB = 1 << 20, 1 << 30
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


class MeasuredDevice(HostDevice):
    """As if it had 100 MiB: what others, the largest step and each graph take are made up."""

    has_own_memory = True

    def __init__(self, graph_bytes: int) -> None:
        super().__init__(checks_graphs=False)
        self._graph_bytes = graph_bytes
        self._free = 60 * MIB
        self.num_forgotten = 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=100 * MIB, free=self._free, reserved=30 * MIB, peak=25 * MIB)

    def forget_peak(self) -> None:
        self.num_forgotten += 1

    def capture(self, run: Callable[[], None]) -> StepGraph:
        # Of the two that a size has, each takes half.
        self._free -= self._graph_bytes // 2
        return super().capture(run)


@pytest.mark.parametrize(
    ("graph_bytes", "sizes"), [(MIB, [1, 2, 4, 8]), (16 * MIB, [4, 8]), (40 * MIB, [8])]
)
def test_a_device_is_measured_and_its_graphs_stay_within_their_bound(
    tmp_path: Path, graph_bytes: int, sizes: list[int]
) -> None:
    directory = write_tiny_llama(tmp_path)
    lines: list[str] = []
    device = MeasuredDevice(graph_bytes)
    config = ExecutorConfig(8, 16)
    executor = DeviceExecutor.load(directory, config, device, PaddedCpuKernels(), lines.append)
    # Of 90 MiB others take 10, the model and its largest step 25 but for a cache of one block.
    left = 90 * MIB - 10 * MIB - (25 * MIB - 8192)
    assert executor.num_blocks == min(left // 8192, 8 * 32)
    assert device.num_forgotten == 2
    assert lines[-3] == "next: a step of 16 tokens, the largest, then graphs"
    taken = format(len(sizes) * graph_bytes // MIB)
    assert lines[-1] == (
        f"graphs: {len(sizes)} of decode steps of {sizes[0]} to 8 sequences, "
        f"{taken} MiB of at most 30 MiB"
    )
    # Sizes without a graph of their own are padded further, and give the same.
    greedy = SamplingParameters(9, temperature=0.0)
    requests = {0: ([5, 6, 7], greedy), 1: ([9, 8], greedy), 2: ([4], greedy)}
    host = load_tiny_executor(directory, cpu_kernels="torch", num_threads=1)
    assert ExecutorRows(executor).run(requests, 4) == ExecutorRows(host).run(requests, 4)
