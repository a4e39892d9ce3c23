"""The GPU's sampler: the CPU backends' tokens, however rows are split, whatever lies beside them.

Rows of every kind and with every filter come in one batch: each is a case of its own.
"""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuKernels
from kernels.cpu.library import runnable
from kernels.gpu import sampling
from kernels.gpu.result_buffers import ResultBuffers, Scratch
from kernels.gpu.sampling import DEFAULT_TILES, Tiles
from kernels.gpu.variant import ModelShapes
from kernels.noise import gumbel_noise
from tests.fakes.gpu_tensors import assert_launched_as_compiled, overhear
from tests.fakes.huge_logits import FILTERS as HUGE_FILTERS
from tests.fakes.huge_logits import huge_logits
from tests.fakes.native_ops import open_sampling

# temperature, min_p, top_k, top_p
FILTERS = {
    "none": (1.0, 0.0, 0, 1.0),
    "warm": (2.0, 0.0, 0, 1.0),
    "min_p": (1.0, 0.05, 0, 1.0),
    "min_p 1": (1.0, 1.0, 0, 1.0),
    "few of top_k": (0.7, 0.0, 20, 1.0),
    "many of top_k": (1.3, 0.0, 2000, 1.0),
    "cold top_k": (0.05, 0.0, 20, 1.0),
    "top_p": (1.0, 0.0, 0, 0.9),
    "nearly all of top_p": (2.0, 0.0, 0, 0.9999),
    "little of top_p": (1.0, 0.0, 0, 0.01),
    "top_k, top_p": (1.0, 0.0, 50, 0.8),
    "many of top_k, top_p": (1.0, 0.0, 3000, 0.8),
    "cold top_k, top_p": (0.1, 0.0, 40, 0.95),
    "min_p, top_p": (1.5, 0.01, 0, 0.9),
    "all": (2.0, 0.02, 30, 0.9),
    "the hottest that is taken": (1e30, 0.5, 0, 0.9),
    "greedy": (0.0, 0.0, 0, 1.0),
    "top_p 0": (1.0, 0.0, 0, 0.0),
    "hardly warm": (2e-5, 0.0, 0, 0.9),
}
# Many segments, many tiles, and more candidates than a list has room for.
SMALL_TILES = Tiles(segment=256, tile=64, measured_tile=32, capacity=16)
RESULTS_OF_SCAN = ("maxima", "likeliest", "scores", "winners")


@pytest.fixture
def scratch(device: torch.device) -> Scratch:
    return ResultBuffers(device).scratch


def kinds_of_logits(vocab_size: int) -> Tensor:
    """A row of each kind that thresholds could stumble over."""
    generator = torch.Generator().manual_seed(vocab_size)
    normal = torch.randn(7, vocab_size, generator=generator)
    rows = [scale * normal[i] for i, scale in enumerate((0.05, 4.0, 1e4))]
    # Equal logits, all and in groups; most of them impossible; one far from all others.
    rows += [torch.full((vocab_size,), -3.5), (normal[3] * 2).round() - 0.0]
    rows.append(normal[4].masked_fill(torch.rand(vocab_size, generator=generator) < 0.9, -math.inf))
    rows[-1][vocab_size // 2] = 0.5
    rows.append(normal[5].clone())
    rows[-1][0] = -1e30
    # As a model's: few likely ones, a long tail.
    ranks = torch.randperm(vocab_size, generator=generator).float() + 1
    rows.append(-1.5 * ranks.log() + 0.3 * normal[6])
    return torch.stack(rows)


@dataclasses.dataclass(frozen=True)
class Batch:
    logits: Tensor
    options: tuple[Tensor, ...]

    def __getitem__(self, rows: object) -> "Batch":
        return Batch(self.logits[rows], tuple(option[rows] for option in self.options))


def batch_of(logits: Tensor, filters: list[tuple[float, float, int, float]]) -> Batch:
    """One row of logits for each of the filters."""
    n = len(filters)
    temperature, min_p, top_k, top_p = zip(*filters, strict=True)
    return Batch(
        logits,
        (
            *(torch.tensor(temperature), torch.tensor(min_p)),
            *(torch.tensor(top_k), torch.tensor(top_p)),
            *(torch.arange(n) * 2**52 - 2**60, torch.arange(n) * 1000),
        ),
    )


def all_filters_on(logits: Tensor) -> Batch:
    """Every row with each of the filters."""
    filters = [f for f in FILTERS.values() for _ in range(len(logits))]
    return batch_of(logits.repeat(len(FILTERS), 1), filters)


def sample(batch: Batch, scratch: Scratch, device: torch.device, tiles=DEFAULT_TILES) -> Tensor:
    out = torch.full((len(batch.logits),), -7, device=device)
    options = (option.to(device) for option in batch.options)
    sampling.sample(batch.logits.to(device), *options, out, scratch, tiles)
    return out.cpu()


def tokens_of_cpu_backends(batch: Batch) -> Iterator[Tensor]:
    yield CpuKernels().sample(batch.logits, *batch.options)
    for instruction_set in runnable()[-1:]:
        with open_sampling(instruction_set) as native:
            yield native.sample(batch.logits, *batch.options)


@pytest.mark.parametrize(
    ("vocab_size", "kinds"), [(1, [1]), (7, [0, 4]), (33, [3, 5]), (1000, [2, 4, 6, 7])]
)
def test_tokens_are_those_of_the_cpu_backends(scratch, device, vocab_size, kinds) -> None:
    batch = all_filters_on(kinds_of_logits(vocab_size)[kinds])
    tokens = sample(batch, scratch, device)
    for expected in tokens_of_cpu_backends(batch):
        assert torch.equal(tokens, expected)


def test_a_vocabulary_of_several_segments(scratch, device) -> None:
    kinds = kinds_of_logits(49152)[[4, 7]]
    batch = batch_of(kinds[torch.arange(len(FILTERS)) // 2 % 2], list(FILTERS.values()))
    tokens = sample(batch, scratch, device)
    for expected in tokens_of_cpu_backends(batch):
        assert torch.equal(tokens, expected)


def test_a_row_s_token_is_the_same_however_it_is_split_and_listed(scratch, device) -> None:
    batch = all_filters_on(kinds_of_logits(400)[[4]])
    tokens = sample(batch, scratch, device, SMALL_TILES)
    assert torch.equal(tokens, sample(batch, scratch, device))
    assert torch.equal(tokens, CpuKernels().sample(batch.logits, *batch.options))


def test_a_row_s_token_is_the_same_alone_and_among_any_others(scratch, device) -> None:
    kinds = kinds_of_logits(100)
    kinds[0, 3] = math.nan
    filters = list(FILTERS.values())[2::3]
    batch = batch_of(kinds[: len(filters)], filters)
    together = sample(batch, scratch, device)
    order = torch.randperm(len(filters), generator=torch.Generator().manual_seed(5))
    assert torch.equal(sample(batch[order], scratch, device), together[order])
    for row in range(len(filters)):
        assert torch.equal(sample(batch[row : row + 1], scratch, device), together[row : row + 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_no_token_can_be_chosen_for_gives_minus_one(scratch, device, bad) -> None:
    logits = kinds_of_logits(150)[[1]].repeat(len(FILTERS), 1)
    batch = batch_of(logits, list(FILTERS.values()))
    if bad == -math.inf:
        logits[:] = bad
    else:
        logits[:, 140] = bad
    assert sample(batch, scratch, device).tolist() == [-1] * len(FILTERS)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize("filters", HUGE_FILTERS)
def test_of_logits_beyond_float32_over_their_temperature_the_likeliest_is_drawn(
    scratch, device, filters
) -> None:
    logits, likeliest = huge_logits(40)
    batch = batch_of(logits, [filters] * len(logits))
    assert sample(batch, scratch, device).tolist() == likeliest
    assert sample(batch, scratch, device, SMALL_TILES).tolist() == likeliest


def test_equal_logits_are_kept_by_token_id(scratch, device) -> None:
    num_draws = 24
    for filters, kept in [((1.0, 0.0, 3, 1.0), 3), ((1.0, 0.0, 0, 0.25), 2)]:
        batch = batch_of(torch.zeros(num_draws, 8), [filters] * num_draws)
        assert set(sample(batch, scratch, device).tolist()) == set(range(kept))


def test_rows_of_a_wider_buffer_and_none_at_all(scratch, device) -> None:
    wide = torch.full((5, 120), 50.0)
    batch = batch_of(wide[:, 4:104], list(FILTERS.values())[3:8])
    batch.logits[:] = kinds_of_logits(100)[:5]
    out = torch.zeros(5, dtype=torch.int64, device=device)
    options = [option.to(device) for option in batch.options]
    sampling.sample(wide.to(device)[:, 4:104], *options, out, scratch)
    assert torch.equal(out.cpu(), CpuKernels().sample(batch.logits, *batch.options))
    assert sample(batch[:0], scratch, device).shape == (0,)


def test_parts_of_a_vocabulary_say_what_the_whole_does(scratch, device) -> None:
    batch = batch_of(kinds_of_logits(96), [FILTERS["none"]] * 8)
    logits, options = batch.logits.to(device), [option.to(device) for option in batch.options]
    parts = []
    for first in (0, 32, 64):
        part = sampling.scan(
            *(logits[:, first : first + 32], *options, scratch, SMALL_TILES, first),
        )
        parts.append({name: part[name].cpu().clone() for name in RESULTS_OF_SCAN})
    merged = {name: torch.cat([part[name] for part in parts], dim=1) for name in RESULTS_OF_SCAN}
    likeliest = merged["likeliest"].gather(1, merged["maxima"].argmax(1, keepdim=True))
    assert torch.equal(likeliest[:, 0].long(), batch.logits.argmax(dim=-1))
    drawn = merged["winners"].gather(1, merged["scores"].argmax(1, keepdim=True))
    assert torch.equal(drawn[:, 0].long(), CpuKernels().sample(batch.logits, *batch.options))
    noise = gumbel_noise(*batch.options[-2:], 96).double()
    assert torch.equal(merged["scores"].amax(dim=1), (batch.logits.double() + noise).amax(dim=1))


@pytest.mark.parametrize("vocab_size", [128256, 50257])
def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch, scratch, vocab_size) -> None:
    kernels = ("scan_kernel", "measure_kernel", "gather_kernel", "choose_kernel")
    variants = list(sampling.variants(ModelShapes(64, 9, 3, 64, 1536, vocab_size)))
    launches = [overhear(monkeypatch, sampling, kernel) for kernel in kernels]
    batch = batch_of(torch.zeros(2, vocab_size), list(FILTERS.values())[:2])
    out = torch.empty(2, dtype=torch.int64)
    sampling.sample(batch.logits, *batch.options, out, scratch)
    for launch, variant in zip(launches, variants, strict=True):
        assert_launched_as_compiled(launch.seen[0], variant)
