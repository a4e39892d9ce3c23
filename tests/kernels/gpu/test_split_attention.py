"""How the keys of decoding sequences are split: the choice, and that it changes no result."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu import split_attention
from kernels.gpu.attention_plan import (
    FIXED_SPLIT_KEYS,
    MIN_SPLIT_KEYS,
    choose_num_splits,
    max_partials,
)
from kernels.gpu.attention_tiles import ATTENTION_DEVICES, AttentionDevice
from tests.fakes.gpu_tensors import assert_close
from tests.fakes.paged_batches import Shape, paged_batch

H200 = ATTENTION_DEVICES["sm_90"]


@given(
    num_sequences=st.integers(1, 4096),
    num_kv_heads=st.integers(1, 64),
    longest=st.integers(1, 1 << 20),
    device=st.sampled_from(list(ATTENTION_DEVICES.values())),
)
def test_partial_results_fit_the_memory_that_is_kept(
    num_sequences, num_kv_heads, longest, device
) -> None:
    num_splits = choose_num_splits(num_sequences, num_kv_heads, longest, device)
    assert 1 <= num_splits <= 128
    assert num_splits == 1 or num_splits * MIN_SPLIT_KEYS <= longest
    assert num_splits == 1 or num_sequences * num_kv_heads * num_splits <= max_partials(device)


def test_the_choice_fills_the_device_once_or_several_times() -> None:
    rounds = {
        num_sequences: choose_num_splits(num_sequences, 8, 1 << 17, H200)
        * num_sequences
        * 8
        / (3 * H200.num_multiprocessors)
        for num_sequences in (1, 2, 4, 8, 16, 64, 256)
    }
    assert all(0.9 < rounds[count] <= 1 for count in (1, 2, 4))
    assert all(4 <= rounds[count] < 6 for count in (8, 16, 64, 256))
    assert choose_num_splits(256, 8, 1 << 17, H200) == 1


@pytest.mark.parametrize("sliding_window", [0, 600])
def test_any_number_of_splits_gives_the_same(monkeypatch, randn, sliding_window) -> None:
    sequences = [(1100, 1), (513, 1), (0, 1), (3, 3), (255, 1)]
    batch = paged_batch(randn, sequences, Shape(3, 1, 64), torch.float16)
    expected = batch.expected(sliding_window)
    for num_splits in (1, 2, 3, 9):
        monkeypatch.setattr(split_attention, "choose_num_splits", lambda *_, n=num_splits: n)
        assert_close(batch.attend(sliding_window), expected)


@pytest.mark.parametrize("num_multiprocessors", [1, 4, 132])
def test_bits_do_not_depend_on_who_computes_the_splits(randn, num_multiprocessors) -> None:
    """In turn by one program, or by several side by side, which each take some."""
    lengths = [1, 511, 513, 2 * FIXED_SPLIT_KEYS + 300, 0]
    shape = Shape(3, 1, 64)
    batch = paged_batch(randn, [(tokens, 1) for tokens in lengths], shape, torch.float16)
    device = AttentionDevice(H200.shared_bytes, num_multiprocessors)
    plan = replace(batch.plan(), device=device)
    actual = batch.attend(batch_invariant=True, plan=plan)
    assert_close(actual, batch.expected())
    assert torch.equal(actual, batch.attend(batch_invariant=True))


@pytest.mark.parametrize(
    ("dtype", "shape", "sliding_window"),
    [
        (torch.bfloat16, Shape(3, 1, 64), 0),
        (torch.float16, Shape(4, 1, 80), 24),
        (torch.bfloat16, Shape(1, 1, 128), 530),
    ],
)
def test_batch_invariant_bits_are_those_of_any_batch_and_chunk(
    randn, dtype, shape, sliding_window
) -> None:
    lengths = [1, 33, 150, 700]
    batch = paged_batch(randn, [(tokens, tokens) for tokens in lengths], shape, dtype)
    starts = batch.cu_seqlens.tolist()
    whole = batch.attend(sliding_window, batch_invariant=True)
    pieces = [(3, 699, 700), (2, 149, 150), (1, 32, 33), (3, 500, 530), (2, 0, 16), (2, 30, 31)]
    batches = [pieces, pieces[:1], pieces[3:4], [(3, p, p + 1) for p in (5, 511, 512, 650)]]
    for chosen in batches:
        alone = batch.only(chosen).attend(sliding_window, batch_invariant=True)
        sizes = [last - first for _, first, last in chosen]
        for part, (sequence, first, last) in zip(alone.split(sizes), chosen, strict=True):
            assert torch.equal(part, whole[starts[sequence] :][first:last])


def test_a_mixed_batch_equals_each_sequence_alone(randn) -> None:
    sequences = [(300, 1), (70, 70), (33, 9), (600, 1), (17, 16)]
    batch = paged_batch(randn, sequences, Shape(8, 2, 64), torch.float16)
    together = batch.attend().split([queries for _, queries in sequences])
    for index, (_, queries) in enumerate(sequences):
        assert_close(batch.only([(index, 0, queries)]).attend(), together[index])
