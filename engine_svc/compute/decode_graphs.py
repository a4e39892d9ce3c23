"""Graphs of the decode step, one for each of a ladder of batch sizes, captured when a model loads.

A step of n sequences runs as the graph of the next size, with padding. Each is two graphs: from
token ids to logits, and from logits to tokens, for which a step with sampling options has ops of
its own. They are captured from the largest size down, so that the smaller ones find their memory in
what the largest took.
"""

from bisect import bisect_left
from collections.abc import Callable

from torch import Tensor

from engine_svc.compute.device_batch import DeviceBatch, StepTensors
from engine_svc.compute.device_sampler import DeviceSampler
from engine_svc.compute.devices import Device, StepGraph
from engine_svc.compute.ranks import ONE_RANK, Ranks

# Sizes are these, then multiples of the last, up to so many steps of it; then of twice, and so on.
_FIRST_SIZES = (1, 2, 4, 8)
_SIZES_PER_STEP = 32


def ladder(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, … up to `largest`, which is the last.

    Beyond 256 the steps double with the size, so that at most an eighth is padding.
    """
    sizes = list(_FIRST_SIZES)
    while sizes[-1] < largest:
        step = _FIRST_SIZES[-1]
        while sizes[-1] >= _SIZES_PER_STEP * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    return (*(size for size in sizes if size < largest), largest)


class DecodeGraph:
    """The decode step of one size: `model`, to `logits` float32 [size, vocab_size], then `draw`."""

    def __init__(
        self,
        device: Device,
        tensors: StepTensors,
        logits_of: Callable[[StepTensors], Tensor],
        sampler: DeviceSampler,
        size: int,
    ) -> None:
        def compute() -> None:
            # Captured once, on a device; a rehearsal may come to other memory each time.
            self.logits = logits_of(tensors)

        def draw() -> None:
            sampler.draw(self.logits, tensors, size)

        # What is called the first time compiles kernels and takes memory, which no capture allows.
        compute()
        draw()
        self.model: StepGraph = device.capture(compute)
        self.draw: StepGraph = device.capture(draw)


class DecodeGraphs:
    """The graphs by size; `max_size` 0 without any."""

    def __init__(self, graphs: dict[int, DecodeGraph]) -> None:
        self._graphs = graphs
        self._sizes = sorted(graphs)
        self.max_size = self._sizes[-1] if self._sizes else 0

    @property
    def sizes(self) -> list[int]:
        return self._sizes

    def padded_size(self, num_sequences: int) -> int:
        """The size whose graph a decode step of so many sequences takes; 0 where none does."""
        if num_sequences > self.max_size:
            return 0
        return self._sizes[bisect_left(self._sizes, num_sequences)]

    def __getitem__(self, size: int) -> DecodeGraph:
        return self._graphs[size]


def capture_graphs(
    device: Device,
    batch: DeviceBatch,
    logits_of: Callable[[StepTensors], Tensor],
    sampler: DeviceSampler,
    largest: int,
    max_bytes: int,
    ranks: Ranks = ONE_RANK,
) -> tuple[DecodeGraphs, int]:
    """Captures a graph for each size of the ladder; returns them, and the memory they take.

    `logits_of` computes a step's model. Where they would take more than max_bytes, the smaller
    sizes go without, and are padded further; so on all ranks. The largest step has run before.
    """
    graphs: dict[int, DecodeGraph] = {}
    taken = 0
    for size in reversed(ladder(largest)):
        if not ranks.least(taken <= max_bytes):
            break
        before = device.memory().free if device.has_own_memory else 0
        graphs[size] = DecodeGraph(device, batch.pad(size), logits_of, sampler, size)
        if device.has_own_memory:
            taken += before - device.memory().free
    return DecodeGraphs(graphs), taken
