"""Ranks with logits on devices choose one rank's tokens, rows with filters apart from others."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine_svc.compute.model.sharded_source import VocabShard
from engine_svc.compute.parallel_device_sampling import DeviceParallelSampling, filtered_rows
from engine_svc.compute.parallel_sampling import ParallelSampling
from engine_svc.compute.ranks import Ranks
from engine_svc.compute.sampling_rows import SamplingInputs
from kernels import KernelConfig, Kernels, select_kernels
from tests.fakes.huge_logits import FILTERS as HUGE_FILTERS
from tests.fakes.huge_logits import huge_logits
from tests.fakes.thread_ranks import run_ranks

VOCAB_SIZE = 300
SIZES = {1: [300], 2: [160, 140], 4: [96, 96, 64, 44]}
CPU = torch.device("cpu")
TORCH = select_kernels(CPU, KernelConfig("float32", implementation="torch"))
# temperature, min_p, top_k, top_p: greedy ones, from all tokens, and with filters.
ROWS = [
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 1.0),
    (1.0, 0.0, 5, 1.0),
    (0.7, 0.0, 0, 0.9),
    (1.0, 0.0, 0, 0.0),
    (1.6, 0.1, 0, 1.0),
    (1.3, 0.0, 0, 1.0),
    (1.3, 0.05, 40, 0.8),
]


@pytest.fixture(scope="module")
def interpreted() -> Kernels:
    return select_kernels(CPU, KernelConfig("float32", implementation="triton"))


def inputs_of(seed: int) -> SamplingInputs:
    temperature, min_p, top_k, top_p = zip(*ROWS, strict=True)
    return SamplingInputs(
        temperature=torch.tensor(temperature),
        min_p=torch.tensor(min_p),
        top_p=torch.tensor(top_p),
        top_k=torch.tensor(top_k),
        seeds=torch.arange(len(ROWS)) + 100 * seed,
        positions=torch.arange(len(ROWS)) + 7,
    )


def parameters_of(inputs: SamplingInputs) -> dict[str, Tensor]:
    names = ("temperature", "min_p", "top_k", "top_p", "seeds", "positions")
    return {name: getattr(inputs, name) for name in names}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_are_those_of_one_rank(interpreted: Kernels, size: int) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(ROWS), VOCAB_SIZE, generator=generator) * 3
        logits[0, [40, 200]] = 20.0
        inputs = inputs_of(seed)
        expected = TORCH.sample(logits.clone(), **parameters_of(inputs)).tolist()
        rows = torch.from_numpy(filtered_rows(inputs))
        assert rows.tolist() == [2, 3, 5, 7]

        def sample(
            ranks: Ranks,
            logits: Tensor = logits,
            rows: Tensor = rows,
            inputs: SamplingInputs = inputs,
        ) -> list[int]:
            first = sum(SIZES[size][: ranks.rank])
            shard = VocabShard(first, SIZES[size][ranks.rank], VOCAB_SIZE)
            sampling = DeviceParallelSampling(interpreted, ranks, shard)
            own = logits[:, first : first + shard.size].contiguous()
            out = torch.zeros(len(logits), dtype=torch.int64)
            parameters = parameters_of(inputs)
            sampling.sample(own, **parameters, out=out)
            sampling.draw_filtered(own, rows, **parameters, out=out)
            return out.tolist()

        assert run_ranks(size, sample) == [expected] * size


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_cannot_be_sampled_is_told(interpreted: Kernels, bad: float) -> None:
    logits = torch.randn(len(ROWS), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logits[1, 290] = logits[3, 5] = bad

    def sample(ranks: Ranks) -> list[int]:
        first = sum(SIZES[2][: ranks.rank])
        shard = VocabShard(first, SIZES[2][ranks.rank], VOCAB_SIZE)
        sampling = DeviceParallelSampling(interpreted, ranks, shard)
        own = logits[:, first : first + shard.size].contiguous()
        out = torch.zeros(len(logits), dtype=torch.int64)
        parameters = parameters_of(inputs_of(1))
        sampling.sample(own, **parameters, out=out)
        rows = torch.from_numpy(filtered_rows(inputs_of(1)))
        sampling.draw_filtered(own, rows, **parameters, out=out)
        return out.tolist()

    for tokens in run_ranks(2, sample):
        assert [row for row, token in enumerate(tokens) if token == -1] == [1, 3]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize("filters", HUGE_FILTERS)
def test_of_logits_beyond_float32_over_their_temperature_the_likeliest_is_drawn(
    interpreted: Kernels, filters: tuple[float, float, int, float]
) -> None:
    logits, likeliest = huge_logits(VOCAB_SIZE)
    count = len(logits)
    inputs = SamplingInputs(
        *(torch.full((count,), filters[place]) for place in (0, 1, 3)),
        *(torch.full((count,), filters[2]), torch.arange(count), torch.arange(count)),
    )

    def sample(ranks: Ranks) -> tuple[list[int], list[int]]:
        first = sum(SIZES[2][: ranks.rank])
        shard = VocabShard(first, SIZES[2][ranks.rank], VOCAB_SIZE)
        own = logits[:, first : first + shard.size].contiguous()
        sampling = DeviceParallelSampling(interpreted, ranks, shard)
        out = torch.zeros(count, dtype=torch.int64)
        sampling.sample(own, **parameters_of(inputs), out=out)
        rows = torch.from_numpy(filtered_rows(inputs))
        sampling.draw_filtered(own, rows, **parameters_of(inputs), out=out)
        parallel = ParallelSampling(TORCH, ranks, shard)
        return out.tolist(), parallel.sample(own, **parameters_of(inputs)).tolist()

    for on_device, on_host in run_ranks(2, sample):
        assert on_device == on_host == likeliest


def test_the_host_knows_which_rows_have_filters() -> None:
    inputs = inputs_of(0)
    assert filtered_rows(inputs).dtype == np.int64
    assert filtered_rows(inputs).tolist() == [2, 3, 5, 7]
