"""Masks, biases and penalties on the GPU against the reference and, in bits, the CPU's."""

import math

import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuKernels
from kernels.gpu import logit_edits
from kernels.gpu.result_buffers import ResultBuffers, Scratch
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import assert_launched_as_compiled, overhear


@pytest.fixture
def scratch(device: torch.device) -> Scratch:
    """What it gives holds numbers already."""
    buffers = ResultBuffers(device)

    def full(purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return buffers.scratch(purpose, shape, dtype).fill_(77)

    return full


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(2)).int()


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 258, 5000])
def test_masks_follow_the_reference(reference, randn, device, vocab_size) -> None:
    logits, allowed = randn(5, vocab_size).cpu(), random_words(3, -(-vocab_size // 32))
    logits[2, 0] = -math.inf
    rows = torch.tensor([4, 0, 2])
    edited = logits.to(device, copy=True)
    logit_edits.mask_logits(edited, rows.to(device), allowed.to(device))
    reference.mask_logits(logits, rows, allowed)
    assert torch.equal(edited.cpu(), logits)


def test_a_mask_hides_no_nan_and_leaves_a_wider_buffer_alone(device) -> None:
    wide = torch.zeros(2, 60, device=device)
    logits = wide[:, :40]
    logits[1, 3] = logits[1, 35] = math.nan
    allowed = torch.tensor([[0b1001, 1 << 6], [0, 0]], dtype=torch.int32, device=device)
    logit_edits.mask_logits(logits, torch.tensor([1, -1], device=device), allowed)
    assert not wide[0].any() and not wide[1, 40:].any()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 38]
    assert logits[1].isnan().nonzero().flatten().tolist() == [3, 35]


def test_biases_follow_the_reference_and_a_ban_wins(reference, randn, device) -> None:
    logits = randn(4, 64).cpu()
    logits[0, 5] = -math.inf
    rows = torch.tensor([3, 0, 0, 1, 3, 3])
    token_ids = torch.tensor([0, 5, 63, 7, 1, 0])
    biases = torch.tensor([1.5, 100.0, -100.0, -math.inf, 0.25, -math.inf])
    edited = logits.to(device, copy=True)
    # A row -1 is none.
    padded = [torch.cat([rows, torch.tensor([-1])]), torch.cat([token_ids, torch.tensor([3])])]
    padded.append(torch.cat([biases, torch.tensor([9.0])]))
    logit_edits.bias_logits(edited, *(part.to(device) for part in padded))
    reference.bias_logits(logits, rows, token_ids, biases)
    assert torch.equal(edited.cpu(), logits)


def test_many_biases(randn, device) -> None:
    logits, biases = randn(3, 700), randn(2000)
    places = torch.randperm(2100, generator=torch.Generator().manual_seed(1))[:2000].to(device)
    expected = logits.clone()
    expected.view(-1)[places] += biases
    logit_edits.bias_logits(logits, places // 700, places % 700, biases)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(("vocab_size", "length"), [(3, 30), (258, 30), (3000, 9000)])
def test_penalties_are_the_cpu_s(randn, device, scratch, vocab_size, length) -> None:
    buffer = randn(7, vocab_size + 100).cpu() * 5
    token_ids = torch.randint(
        0, vocab_size, (6, length), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    token_ids[3, : length // 2] = vocab_size // 2
    options = (
        torch.tensor([0, 5, 2, 3, 1, 4]),
        token_ids,
        torch.tensor([1, length, 10, length // 3, 10, 5]),
        torch.tensor([1, length, 10, length, 20, 25]),
        torch.tensor([1.3, 1.3, 0.8, 1.0, 1.0, 2.0]),
        torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0, -1.0]),
        torch.tensor([0.5, 0.5, 0.0, 0.01, 0.3, 0.7]),
    )
    edited = buffer.to(device, copy=True)
    on_device = (option.to(device) for option in options)
    logit_edits.penalize(edited[:, :vocab_size], *on_device, scratch)
    CpuKernels().penalize(buffer[:, :vocab_size], *options)
    # A device may fuse a product with a sum, which rounds once less.
    tolerance = 0.0 if device.type == "cpu" else 1e-6
    assert torch.allclose(edited.cpu(), buffer, rtol=tolerance, atol=tolerance)


def test_what_is_not_in_a_sequence_changes_no_bit(randn, device, scratch) -> None:
    logits = randn(3, 64)
    before = logits.clone()
    token_ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], dtype=torch.int32)
    token_ids[0, 3] = 64  # no token
    options = (
        torch.tensor([0, 1, -1]),
        token_ids,
        torch.tensor([1, 0, 2]),
        torch.tensor([4, 0, 4]),
        torch.tensor([1.0, 2.0, 2.0]),
        torch.tensor([0.0, 2.0, 2.0]),
        torch.tensor([0.0, 2.0, 2.0]),
    )
    logit_edits.penalize(logits, *(option.to(device) for option in options), scratch)
    assert torch.equal(logits, before)


def test_nothing_to_edit(device, scratch) -> None:
    logits, rows = torch.zeros(0, 64, device=device), torch.zeros(0, dtype=torch.int64)
    words = torch.zeros(0, 4, dtype=torch.int32)
    logit_edits.mask_logits(logits, rows, words)
    logit_edits.bias_logits(logits, rows, rows, torch.zeros(0))
    numbers = torch.zeros(0)
    logit_edits.penalize(logits, rows, words, rows, rows, numbers, numbers, numbers, scratch)


@pytest.mark.parametrize("vocab_size", [128256, 50257])
def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch, scratch, vocab_size) -> None:
    variants = list(logit_edits.variants(ModelShapes(64, 9, 3, 64, 1536, vocab_size)))
    launches = [overhear(monkeypatch, logit_edits, form.kernel.__name__) for form in variants]
    logits, rows = torch.zeros(2, vocab_size), torch.arange(2)
    logit_edits.mask_logits(logits, rows, random_words(2, -(-vocab_size // 32)))
    numbers = torch.ones(2)
    logit_edits.bias_logits(logits, rows, rows, numbers)
    tokens = torch.zeros(2, 7, dtype=torch.int32)
    logit_edits.penalize(logits, rows, tokens, rows, rows, numbers, numbers, numbers, scratch)
    for launch, variant in zip(launches, variants, strict=True):
        assert_launched_as_compiled(launch.seen[0], variant)
