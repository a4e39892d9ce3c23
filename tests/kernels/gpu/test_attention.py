"""Attention over the paged cache against the reference: any batch, model, cache and layout."""

from dataclasses import replace

import pytest
import torch

from kernels.gpu import attention, merged_attention, split_attention
from kernels.gpu.attention_plan import plan_attention
from kernels.gpu.attention_tiles import ATTENTION_DEVICES
from kernels.gpu.kv_cache import KvFormat
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import assert_close, assert_launched_as_compiled, overhear
from tests.fakes.paged_batches import Shape, paged_batch, scratch_of

# (tokens of a sequence, of which queries): decode, prefill, chunks, borders of blocks and tiles.
BATCHES = {
    "one token": [(1, 1)],
    "decode": [(5, 1), (16, 1), (17, 1), (64, 1), (65, 1), (1, 1)],
    "long decode": [(700, 1), (30, 1), (0, 1)],
    "prefill": [(150, 150)],
    "prefills": [(7, 7), (16, 16), (43, 43), (1, 1)],
    "chunks": [(40, 8), (33, 17), (130, 50), (16, 15)],
    "mixture": [(90, 1), (20, 20), (64, 1), (50, 13), (300, 1), (85, 80)],
    "padding": [(33, 1), (0, 1), (0, 1)],
    "nothing to see": [(0, 3), (0, 1), (20, 2)],
    "no queries": [(5, 0), (7, 1), (9, 0), (20, 0)],
}
MIXTURE = [(70, 1), (20, 20), (0, 1), (33, 9)]
SHAPES = [
    *(Shape(1, 1, 64), Shape(3, 1, 64), Shape(8, 2, 128), Shape(8, 1, 96)),
    *(Shape(4, 2, 80), Shape(2, 1, 256), Shape(20, 1, 64)),
]


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("sliding_window", [0, 24])
def test_batches(randn, sequences, sliding_window) -> None:
    batch = paged_batch(randn, sequences, Shape(6, 2, 64), torch.float16)
    assert_close(batch.attend(sliding_window), batch.expected(sliding_window))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models(randn, shape, dtype) -> None:
    batch = paged_batch(randn, MIXTURE, shape, dtype)
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_format", list(KvFormat))
def test_caches(randn, dtype, kv_format) -> None:
    batch = paged_batch(randn, MIXTURE, Shape(6, 2, 80), dtype, kv_format)
    expected = batch.expected()
    actual = batch.attend()
    if kv_format in (KvFormat.FP8, KvFormat.INT8, KvFormat.BFLOAT16) and dtype == torch.float16:
        # Products are of bfloat16 then.
        dtype = torch.bfloat16
    assert_close(actual.to(dtype), expected.to(dtype))


@pytest.mark.parametrize("block_size", [1, 8, 24, 128])
def test_block_sizes(randn, block_size) -> None:
    batch = paged_batch(randn, MIXTURE, Shape(4, 2, 64, block_size), torch.float16)
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("sliding_window", [1, 16, 65])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_windows_and_soft_caps(randn, sliding_window, soft_cap) -> None:
    sequences = [(150, 1), (150, 150), (700, 1)]
    batch = paged_batch(randn, sequences, Shape(3, 1, 64), torch.float16)
    expected = batch.expected(sliding_window, soft_cap)
    assert_close(batch.attend(sliding_window, soft_cap), expected)


def test_a_soft_cap_bounds_the_largest_scores(randn) -> None:
    batch = paged_batch(randn, MIXTURE, Shape(3, 1, 64), torch.float16)
    batch.query.mul_(1e3)
    assert_close(batch.attend(0, 3.0), batch.expected(0, 3.0))


@pytest.mark.parametrize("soft_cap", [50.0, 300.0])
def test_a_soft_cap_loses_nothing_of_scores_much_smaller_than_it(randn, soft_cap) -> None:
    batch = paged_batch(randn, [(15, 1), (150, 3)], Shape(3, 3, 128, 1), torch.float32)
    assert_close(batch.attend(0, soft_cap), batch.expected(0, soft_cap))


def test_a_soft_cap_does_not_make_a_number_of_nan(randn) -> None:
    batch = paged_batch(randn, [(15, 1), (20, 1)], Shape(3, 1, 64))
    batch.query[0] = float("nan")
    found = batch.attend(0, 30.0)
    assert bool(found[0].isnan().all())
    assert_close(found[1:], batch.expected(0, 30.0)[1:])


@pytest.mark.parametrize("sequences", [BATCHES["decode"], MIXTURE])
def test_rows_of_larger_tables_and_long_integers(randn, sequences) -> None:
    batch = paged_batch(randn, sequences, Shape(4, 2, 64), torch.float16)
    count = len(sequences) + 3
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(3))[: len(sequences)]
    rows = rows.to(batch.query.device)
    seq_lens = torch.full((count,), 99, device=rows.device)
    block_table = torch.full((count, 50), 1 << 30, device=rows.device)
    seq_lens[rows] = batch.seq_lens.long()
    block_table[rows, : batch.block_table.shape[1]] = batch.block_table.long()
    plan = plan_attention(batch.cu_seqlens.long(), seq_lens, block_table, 16, rows)
    assert_close(batch.attend(plan=plan), batch.expected())


def test_tensors_whose_tokens_lie_apart(randn) -> None:
    batch = paged_batch(randn, MIXTURE, Shape(4, 2, 64))
    tokens = len(batch.query)
    fused = randn(tokens, 8, 64)
    fused[:, :4] = batch.query
    wide = torch.full((tokens, 6, 64), torch.nan, device=fused.device)
    attention.paged_attention(
        *(fused[:, :4], batch.kv_layer, batch.plan(), 0.125, 0, 0.0),
        *(wide[:, 1:5], scratch_of(fused.device), False),
    )
    assert_close(wide[:, 1:5], batch.expected())
    assert wide[:, 0].isnan().all() and wide[:, 5].isnan().all()


def test_no_tokens(randn) -> None:
    assert paged_batch(randn, [(5, 0)], Shape(4, 2, 64)).attend().shape == (0, 4, 64)


@pytest.mark.parametrize("name", ATTENTION_DEVICES)
def test_the_tiles_of_each_device(randn, name) -> None:
    batch = paged_batch(randn, MIXTURE, Shape(4, 2, 64), torch.bfloat16)
    plan = replace(batch.plan(), device=ATTENTION_DEVICES[name])
    assert_close(batch.attend(plan=plan), batch.expected())


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("kv_format", "sliding_window"), [(KvFormat.BFLOAT16, 0), (KvFormat.FP8, 128)]
)
@pytest.mark.parametrize("name", ATTENTION_DEVICES)
def test_what_is_compiled_ahead_is_what_is_launched(
    monkeypatch, randn, batch_invariant, kv_format, sliding_window, name
) -> None:
    """What a prefill and a few sizes of a decode step launch is all that is compiled."""
    kernels = {
        "_attention_kernel": attention,
        "_split_kernel": split_attention,
        "_merge_kernel": merged_attention,
        "_merge_in_turn_kernel": merged_attention,
    }
    launches = {name: overhear(monkeypatch, module, name) for name, module in kernels.items()}
    for sequences in [[(20, 20)], *([(1, 1)] * count for count in (2, 40, 150, 600))]:
        batch = paged_batch(randn, sequences, Shape(8, 2, 64), torch.bfloat16, kv_format)
        # So that a sequence could be long.
        block_table = batch.block_table[:, :1].expand(-1, 4000).contiguous()
        plan = plan_attention(batch.cu_seqlens, batch.seq_lens, block_table, 16)
        plan = replace(plan, device=ATTENTION_DEVICES[name])
        batch.attend(sliding_window, 0.0, batch_invariant, plan)
    shapes = ModelShapes(512, 8, 2, 64, 1, 1, kv_format=kv_format, sliding_window=sliding_window)
    variants = [
        variant
        for variant in attention.variants(shapes)
        if name in (variant.devices or ATTENTION_DEVICES)
    ]
    launched_variants = set()
    for kernel in launches.values():
        for launched in kernel.seen:
            (index,) = [
                index
                for index, variant in enumerate(variants)
                if variant.kernel is kernel and variant.constexprs.items() <= launched.items()
            ]
            num_stages = variants[index].num_stages
            assert launched.get("num_stages", num_stages) == num_stages
            shown = {name: value for name, value in launched.items() if name != "num_stages"}
            assert_launched_as_compiled(shown, variants[index])
            assert not variants[index].may_spill
            launched_variants.add(index)
    of_mode = {
        index
        for index, variant in enumerate(variants)
        if ("batch-invariant" in variant.label or "in turn" in variant.label) == batch_invariant
    }
    assert launched_variants == of_mode


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("queries", [1, 20])
def test_tiles_before_the_window_are_not_read(randn, batch_invariant, queries) -> None:
    tokens, sliding_window = 300, 40
    batch = paged_batch(randn, [(tokens, queries)], Shape(3, 1, 64), torch.float16)
    expected = batch.expected(sliding_window)
    largest_tile = 64
    unseen = (tokens - queries + 1 - sliding_window) // largest_tile * largest_tile
    assert unseen >= 192
    for position in range(unseen):
        block = int(batch.block_table[0, position // 16])
        batch.kv_layer.data[:, block, position % 16] = torch.nan
    assert_close(batch.attend(sliding_window, batch_invariant=batch_invariant), expected)
