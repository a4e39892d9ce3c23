"""Norm, rotation and the write to the cache against the reference, in one kernel.

Rotated queries are rounded once from float32. An element of the cache is off by at most half a
place: of fp8 1/16 of itself, or half of 2^-9 of its scale; of int8 half its scale.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.gpu import rope
from kernels.gpu.kv_cache import GpuKvCache, GpuKvLayer, KvFormat
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import (
    assert_close,
    assert_launched_as_compiled,
    overhear,
    read_cache,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUPS = [(2, 2), (9, 3), (4, 1), (16, 2)]  # 1, 3, 4 and 8 query heads to a KV head
DIMS = [64, 80, 96, 128, 256]
EPS = 1e-6
BLOCK_SIZE, NUM_BLOCKS = 16, 4
UNWRITTEN = 0x11
# Block borders, the last slot of all, and padding.
SLOTS = [0, 15, -1, 16, 63, -1, 5]


@dataclass
class Batch:
    """Views of a fused projection, and all else that the kernel reads."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    table: Tensor
    slots: Tensor
    norms: tuple[Tensor | None, Tensor | None]

    def run(self, kv_layer: GpuKvLayer, rows: slice = slice(None)) -> Tensor:
        out = torch.empty_like(self.query[rows])
        rope.rope_and_cache(
            *(self.query[rows], self.positions[rows], self.key[rows], self.value[rows]),
            *(self.positions[rows], self.table, kv_layer, self.slots[rows], *self.norms, EPS, out),
        )
        return out


def make_batch(
    randn: Callable[..., Tensor],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    has_norms: bool,
) -> Batch:
    tokens = len(SLOTS)
    projected = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    query, key, value = projected.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    angles = randn(300, dim // 2) * 100
    positions = torch.randint(300, (tokens,), generator=torch.Generator().manual_seed(1))
    positions[0], positions[1] = 0, 299
    norms = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if has_norms else (None, None)
    return Batch(
        *(query, key, value, positions.to(query.device)),
        torch.cat([angles.cos(), angles.sin()], dim=-1),
        torch.tensor(SLOTS, dtype=torch.int32, device=query.device),
        norms,
    )


def empty_layer(kv_format: KvFormat, batch: Batch) -> GpuKvLayer:
    _, kv_heads, dim = batch.key.shape
    device = batch.key.device
    cache = GpuKvCache(kv_format, 2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim, device)
    cache.data.view(torch.uint8).fill_(UNWRITTEN)
    if cache.scales is not None:
        cache.scales.fill_(UNWRITTEN)
    return cache[1]


def expected_of(reference, batch: Batch) -> tuple[Tensor, Tensor]:
    """The rotated query, and keys and values of the tokens that have a slot; float64."""
    _, kv_heads, dim = batch.key.shape
    cached = batch.slots >= 0
    kv_layer = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim).double()
    rotated = reference.rope_and_cache(
        *(batch.query.double().cpu(), batch.positions.cpu()),
        *(batch.key[cached].double().cpu(), batch.value[cached].double().cpu()),
        *(batch.positions[cached].cpu(), batch.table.cpu(), kv_layer, batch.slots[cached].cpu()),
        *(norm if norm is None else norm.cpu() for norm in batch.norms),
        EPS,
    )
    slots = batch.slots[cached].long().cpu()
    return rotated.to(batch.query), kv_layer.flatten(1, 2)[:, slots].to(batch.query.device)


def check(reference, batch: Batch, kv_format: KvFormat) -> None:
    kv_layer = empty_layer(kv_format, batch)
    rotated = batch.run(kv_layer)
    expected, expected_kv = expected_of(reference, batch)
    assert_close(rotated, expected)
    slots = batch.slots[batch.slots >= 0].long()
    assert_cached(read_cache(kv_layer).flatten(1, 2)[:, slots], expected_kv, kv_format)
    # All other slots are as they were.
    untouched = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=slots.device)
    untouched[slots] = False
    stored = kv_layer.data.view(torch.uint8).flatten(1, 2)
    assert (stored[:, untouched] == UNWRITTEN).all()
    if kv_layer.scales is not None:
        assert (kv_layer.scales.flatten(1, 2)[:, untouched] == UNWRITTEN).all()


def assert_cached(actual: Tensor, expected: Tensor, kv_format: KvFormat) -> None:
    if not kv_format.has_scales:
        assert_close(actual.to(kv_format.dtype), expected.to(kv_format.dtype))
        return
    scales = expected.abs().amax(-1, keepdim=True) / kv_format.largest
    allowed = scales / 2
    if kv_format is KvFormat.FP8:
        allowed = torch.maximum(expected.abs() / 16, scales * 2.0**-10)
    # The value itself is rounded in float32 before.
    assert ((actual - expected).abs() <= allowed * 1.0001 + scales * 1e-3).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("has_norms", [False, True])
def test_every_shape(reference, randn, dim, heads, kv_heads, has_norms) -> None:
    batch = make_batch(randn, heads, kv_heads, dim, torch.bfloat16, has_norms)
    check(reference, batch, KvFormat.BFLOAT16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format", KvFormat)
@pytest.mark.parametrize("dim", [64, 80])
def test_every_type_and_format(reference, randn, dtype, kv_format, dim) -> None:
    check(reference, make_batch(randn, 9, 3, dim, dtype, True), kv_format)


@pytest.mark.parametrize("kv_format", [KvFormat.FLOAT32, KvFormat.INT8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(20, 20), (33, 3)])
def test_more_heads_than_a_program_holds(reference, randn, kv_format, heads, kv_heads) -> None:
    tile = rope.choose_tile(heads, kv_heads, 256)
    assert tile.heads < heads
    check(reference, make_batch(randn, heads, kv_heads, 256, torch.float32, True), kv_format)


def test_queries_of_other_tokens_than_the_keys_and_a_result_in_place(reference, randn) -> None:
    batch = make_batch(randn, 4, 2, 64, torch.float32, True)
    expected, expected_kv = expected_of(reference, batch)
    kv_layer = empty_layer(KvFormat.FLOAT32, batch)
    chosen = torch.tensor([6, 1], device=batch.query.device)
    query = batch.query[chosen]
    rope.rope_and_cache(
        *(query, batch.positions[chosen].int(), batch.key, batch.value, batch.positions),
        *(batch.table, kv_layer, batch.slots.long(), *batch.norms, EPS, query),
    )
    assert_close(query, expected[chosen])
    slots = batch.slots[batch.slots >= 0].long()
    assert_cached(kv_layer.data.flatten(1, 2)[:, slots], expected_kv, KvFormat.FLOAT32)


def test_no_queries_and_no_tokens_at_all(randn) -> None:
    batch = make_batch(randn, 4, 2, 64, torch.float32, False)
    kv_layer = empty_layer(KvFormat.FLOAT32, batch)
    batch.run(kv_layer, slice(0, 0))
    out = torch.empty_like(batch.query[:0])
    rope.rope_and_cache(
        *(out, batch.positions[:0], batch.key, batch.value, batch.positions, batch.table),
        *(kv_layer, batch.slots, None, None, EPS, out),
    )
    assert torch.equal(kv_layer.data.flatten(1, 2)[1, 5], batch.value[6])


@pytest.mark.parametrize("kv_format", KvFormat)
def test_a_token_is_bit_equal_alone_and_among_others_even_nan(randn, kv_format) -> None:
    batch = make_batch(randn, 4, 2, 80, torch.bfloat16, True)
    for x in (batch.query, batch.key, batch.value):
        x[3, 0, 7] = torch.nan
    kv_layer = empty_layer(kv_format, batch)
    rotated = batch.run(kv_layer)
    # The head is not to be mistaken for numbers; nothing else is touched.
    assert rotated.isnan().any(-1).nonzero().tolist() == [[3, 0]]
    broken = read_cache(kv_layer).flatten(1, 2).isnan().any(-1)
    assert broken.nonzero().tolist() == [[0, SLOTS[3], 0], [1, SLOTS[3], 0]]
    for first, last in [(0, 1), (4, 7), (1, 3)]:
        alone_layer = empty_layer(kv_format, batch)
        alone = batch.run(alone_layer, slice(first, last))
        assert torch.equal(alone, rotated[first:last])
        slots = [slot for slot in SLOTS[first:last] if slot >= 0]
        for part, whole in zip(alone_layer.stored(), kv_layer.stored(), strict=True):
            assert torch.equal(part.flatten(0, 1)[slots], whole.flatten(0, 1)[slots])


@pytest.mark.parametrize(
    ("kv_format", "dtype", "has_norms"),
    [
        (KvFormat.BFLOAT16, torch.bfloat16, False),
        (KvFormat.FP8, torch.bfloat16, True),
        (KvFormat.INT8, torch.float32, False),
    ],
)
def test_what_is_compiled_ahead_is_what_is_launched(
    monkeypatch, randn, kv_format, dtype, has_norms
) -> None:
    launches = overhear(monkeypatch, rope, "_rope_kernel")
    batch = make_batch(randn, 9, 3, 80, dtype, has_norms)
    batch.positions = batch.positions.int()
    batch.run(empty_layer(kv_format, batch))
    shapes = ModelShapes(
        *(576, 9, 3, 80, 1536, 100), dtype=dtype, kv_format=kv_format, qk_norm=has_norms
    )
    for launched, variant in zip(launches.seen, rope.variants(shapes), strict=True):
        assert_launched_as_compiled(launched, variant)
        assert not variant.may_spill and not variant.needs
