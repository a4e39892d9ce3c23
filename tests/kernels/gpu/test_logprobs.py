"""Log-probabilities on the GPU against the reference: order, ties, rounding, odd rows."""

import math

import pytest
import torch
from torch import Tensor

from kernels.gpu import logprobs
from kernels.gpu.result_buffers import ResultBuffers, Scratch
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import assert_launched_as_compiled, overhear

SMALL_SEGMENT = 64


@pytest.fixture
def scratch(device: torch.device) -> Scratch:
    return ResultBuffers(device).scratch


def rows_of(vocab_size: int) -> Tensor:
    """Wide and narrow, equal in groups and all, most of it impossible."""
    normal = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    rows = [0.01 * normal[0], 3 * normal[1], (normal[2] * 2).round(), normal[3] * 0 - 2.5]
    rows.append(normal[4].clone())
    rows[-1][1:] = -math.inf
    return torch.stack(rows)


def list_logprobs(
    logits: Tensor, chosen: Tensor, num_top: int, scratch: Scratch, device: torch.device, **options
) -> tuple[Tensor, Tensor, Tensor]:
    n = len(logits)
    chosen_out = torch.zeros(n, device=device)
    top_ids = torch.zeros(n, num_top, dtype=torch.int64, device=device)
    top_out = torch.zeros(n, num_top, device=device)
    logprobs.token_logprobs(
        logits.to(device), chosen.to(device), chosen_out, top_ids, top_out, scratch, **options
    )
    return chosen_out.cpu(), top_ids.cpu(), top_out.cpu()


@pytest.mark.parametrize(
    ("vocab_size", "num_top"), [(1, 0), (1, 1), (7, 3), (33, 33), (1000, 20), (20_011, 5)]
)
def test_they_follow_the_reference(reference, scratch, device, vocab_size, num_top) -> None:
    logits = rows_of(vocab_size)
    chosen = torch.arange(len(logits)) * 7 % vocab_size
    expected = reference.token_logprobs(logits, chosen, num_top)
    actual = list_logprobs(logits, chosen, num_top, scratch, device)
    assert torch.equal(actual[1], expected[1])
    for values, wanted in ((actual[0], expected[0]), (actual[2], expected[2])):
        assert torch.allclose(values, wanted, rtol=1e-6, atol=1e-6)


def test_a_row_gives_the_same_bits_alone_and_in_a_wider_buffer(scratch, device) -> None:
    wide = torch.full((5, 220), 50.0)
    logits = wide[:, 8:208]
    logits[:] = rows_of(200)
    chosen = torch.arange(5)
    together = list_logprobs(logits, chosen, 6, scratch, device)
    for row in range(5):
        one = slice(row, row + 1)
        alone = list_logprobs(logits[one].contiguous(), chosen[one], 6, scratch, device)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_how_a_row_is_split_changes_ids_never(reference, scratch, device) -> None:
    logits, chosen = rows_of(500), torch.full((5,), 499)
    expected = reference.token_logprobs(logits, chosen, 9)
    actual = list_logprobs(logits, chosen, 9, scratch, device, segment=SMALL_SEGMENT)
    assert torch.equal(actual[1], expected[1])
    assert torch.allclose(actual[0], expected[0], rtol=1e-6, atol=1e-6)


def test_tokens_whose_logprobs_round_to_the_same_are_listed_by_id(scratch, device) -> None:
    logits = torch.zeros(1, 500)
    logits[0, 490] = 1.0
    logits[0, 100] = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    _, top_ids, top = list_logprobs(logits, torch.tensor([0]), 2, scratch, device)
    assert top_ids.tolist() == [[100, 490]]
    assert top[0, 0] == top[0, 1]


def test_rows_that_have_no_probabilities_and_tokens_that_are_none(scratch, device) -> None:
    logits = rows_of(100)
    logits[1, 99], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    chosen = torch.tensor([0, 0, 0, 0, -1])
    values, top_ids, top = list_logprobs(logits, chosen, 5, scratch, device)
    assert values.isnan().tolist() == [False, True, True, True, True]
    assert top.isnan().any(dim=1).tolist() == [False, True, True, True, False]
    assert int(top_ids.min()) >= 0 and int(top_ids.max()) < 100
    assert list_logprobs(logits[:0], chosen[:0], 5, scratch, device)[1].shape == (0, 5)


@pytest.mark.parametrize("vocab_size", [128256, 50257])
def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch, scratch, vocab_size) -> None:
    variants = list(logprobs.variants(ModelShapes(64, 9, 3, 64, 1536, vocab_size)))
    names = ("sum_kernel", "rank_kernel", "list_kernel")
    launches = {name: overhear(monkeypatch, logprobs, name) for name in names}
    for num_top in (0, 1, 5, 32):
        list_logprobs(
            torch.zeros(2, vocab_size), torch.zeros(2).long(), num_top, scratch, torch.device("cpu")
        )
    for name in ("sum_kernel", "rank_kernel"):
        for launched in launches[name].seen:
            forms = [form for form in variants if form.kernel.__name__ == name]
            assert_launched_as_compiled(launched, forms[0])
    forms = [form for form in variants if form.kernel.__name__ == "list_kernel"]
    # For no, one and five of the likeliest; for 32, which is the most that engines ask for.
    for launched, form in zip(launches["list_kernel"].seen, [forms[0], *forms], strict=True):
        assert_launched_as_compiled(launched, form)
