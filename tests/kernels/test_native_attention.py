"""The native library's rotary embedding, KV cache and attention: every build against plain sums.

A query's bits depend on its position and its sequence's keys alone: not on the build, the batch,
the chunking, the threads, nor on what lies where it must not look.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import runnable
from tests.fakes.native_attention import (
    EPS,
    F16,
    F32,
    INT8,
    KEPT_SEQUENCES,
    KEPT_TOKENS,
    NAMES,
    TOKENS,
    Batch,
    Cache,
    Shape,
    same_bits,
)
from tests.fakes.native_ops import (
    NativeOps,
    QuantisedRows,
    aligned,
    plain_rows,
)

BUILDS = runnable()
# A few sums and exponentials of float32.
TOLERANCE = 1e-5

SHAPES = [
    Shape(9, 3, 64),
    Shape(9, 3, 64, window=20),
    Shape(9, 3, 64, kind=INT8),
    Shape(9, 3, 64, kind=F32),
    Shape(2, 2, 8, block_size=5),
    Shape(2, 2, 8, block_size=5, kind=INT8, window=7),
    Shape(4, 1, 128, block_size=32),
    Shape(4, 1, 128, block_size=32, kind=INT8),
    Shape(8, 1, 80, block_size=1),
    Shape(8, 1, 80, block_size=1, kind=F32, window=3),
    Shape(2, 1, 96, block_size=100),
    Shape(16, 2, 16, block_size=256, kind=INT8, window=130),
    Shape(3, 3, 256, block_size=16),
    Shape(14, 1, 18, block_size=16, kind=F32),
]


@pytest.fixture(params=BUILDS)
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    with NativeOps(request.param, num_threads=2) as opened:
        yield opened


@pytest.fixture(params=BUILDS[-1:])
def best_ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    with NativeOps(request.param, num_threads=2) as opened:
        yield opened


def rotated(x: Tensor, cache: Cache) -> Tensor:
    """x [T, heads · dim] -> float64 [T, heads, dim]."""
    x = x.double().unflatten(1, (-1, cache.shape.head_dim))
    if cache.has_norm:
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * cache.norm.double()
    cos, sin = cache.cos_sin.double()[cache.positions, None].chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_dim", [8, 18, 64, 80, 256])
def test_queries_are_rotated_in_place(ops, head_dim, has_norm) -> None:
    cache = Cache(Shape(3, 1, head_dim), [70, 5], has_norm=has_norm)
    query = torch.full((75, 3 * head_dim + 5), torch.nan)
    query[:, : 3 * head_dim] = cache.query

    def add(library: Any, program: int) -> None:
        library.tl_add_rope(
            program, TOKENS, query.data_ptr(), query.stride(0), 3, head_dim, cache.rotary()
        )

    ops.run(add, len(query))
    expected = rotated(cache.query, cache).flatten(1)
    assert (query[:, : 3 * head_dim] - expected).abs().max() < 2e-6 * expected.abs().max()
    assert query[:, 3 * head_dim :].isnan().all()


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_cache_holds_rotated_keys_and_values(ops, shape, has_norm) -> None:
    cache = Cache(shape, [35, 1, 17], has_norm=has_norm).fill(ops)
    keys, values = (
        torch.cat(parts) for parts in zip(*(cache.stored(i) for i in range(3)), strict=True)
    )
    for actual, expected in [
        (keys, rotated(cache.key, cache)),
        (values, cache.value.double().unflatten(1, (-1, shape.head_dim))),
    ]:
        most = expected.abs().amax(-1, keepdim=True)
        rounding = {F32: 1e-6, F16: 5e-4, INT8: 0.501 / 127}[shape.kind]
        assert ((actual - expected).abs() / most).max() < rounding


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_whole_prompts(ops, shape) -> None:
    lengths = [1, 2, 15, 16, 17, 33, 150]
    cache = Cache(shape, lengths).fill(ops)
    results = cache.attend(ops, [(i, 0, length) for i, length in enumerate(lengths)])
    for i, result in enumerate(results):
        assert (result - cache.expected(i)).abs().max() < TOLERANCE


@pytest.mark.parametrize("shape", [Shape(4, 2, 32), Shape(4, 2, 32, window=300)], ids=str)
@pytest.mark.parametrize("magnitude", [0.0, 30.0, 1000.0])
def test_scores_of_any_size(best_ops, shape, magnitude) -> None:
    cache = Cache(shape, [600])
    cache.query *= magnitude
    cache.fill(best_ops)
    expected = cache.expected(0)
    tolerance = TOLERANCE * max(1.0, magnitude)
    [whole] = cache.attend(best_ops, [(0, 0, 600)])
    assert (whole - expected).abs().max() < tolerance
    [last] = cache.attend(best_ops, [(0, 599, 600)])
    assert same_bits(last, whole[599:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_builds_give_the_same_bits(shape) -> None:
    lengths = [1, 30, 130]
    chunks = [(0, 0, 1), (1, 0, 30), (2, 100, 130), (2, 99, 100)]
    results = []
    for build in BUILDS:
        with NativeOps(build) as ops:
            cache = Cache(shape, lengths, has_norm=True).fill(ops)
            results.append((cache.memory, torch.cat(cache.attend(ops, chunks))))
    for memory, result in results[1:]:
        assert torch.equal(memory, results[0][0])
        assert same_bits(result, results[0][1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("build", BUILDS[-1:])
def test_a_query_is_the_same_in_any_chunk_and_any_batch(build, shape, num_threads) -> None:
    lengths = [700, 3, 90, 1500]
    with NativeOps(build, num_threads) as ops:
        cache = Cache(shape, lengths).fill(ops)
        whole = [cache.attend(ops, [(i, 0, length)])[0] for i, length in enumerate(lengths)]
        together = cache.attend(ops, [(i, 0, length) for i, length in enumerate(lengths)])
        assert all(map(same_bits, together, whole))
        # Alone, a last token is split into parts; beside others it is not.
        ends = [(i, length - 1, length) for i, length in enumerate(lengths)]
        alone = [cache.attend(ops, [end])[0] for end in ends]
        several = cache.attend(ops, ends * 12)
        for i, _ in enumerate(lengths):
            assert same_bits(alone[i], whole[i][-1:])
            assert all(same_bits(result, whole[i][-1:]) for result in several[i::4])
        # Few tokens at the end of a long text, as speculation has them, and chunks of a prompt.
        chunks = [(0, 695, 700), (3, 1300, 1337), (1, 1, 3), (3, 40, 41), (2, 17, 64), (0, 0, 5)]
        for (i, first, end), result in zip(chunks, cache.attend(ops, chunks), strict=True):
            assert same_bits(result, whole[i][first:end])
        [few] = cache.attend(ops, [(3, 1496, 1500)])
        assert same_bits(few, whole[3][1496:])


@pytest.mark.parametrize("kind", [F16, F32, INT8], ids=NAMES.get)
@pytest.mark.parametrize("window", [0, 25])
def test_nan_stays_where_it_is_seen(ops, kind, window) -> None:
    shape = Shape(6, 2, 32, kind=kind, window=window)
    clean = Cache(shape, [100, 50]).fill(ops)
    [before, other] = clean.attend(ops, [(0, 0, 100), (1, 0, 50)])
    broken = Cache(shape, [100, 50])
    broken.key[60, 3] = broken.value[61, 40] = torch.nan
    broken.query[20, 7] = torch.nan
    broken.fill(ops)
    [after, untouched] = broken.attend(ops, [(0, 0, 100), (1, 0, 50)])
    assert same_bits(untouched, other)
    assert same_bits(after[:20], before[:20])
    assert after[20, : shape.head_dim].isnan().all()
    assert same_bits(after[20, shape.head_dim :], before[20, shape.head_dim :])
    assert same_bits(after[21:60], before[21:60])
    seen = after[61 : 60 + (window or 40)]
    first_kv_head = 3 * shape.head_dim
    assert seen[:, :first_kv_head].isnan().all()
    # In a value, only the column has it; as int8, the whole head.
    assert seen[:, first_kv_head + 8].isnan().all()
    if window:
        assert same_bits(after[61 + window :], before[61 + window :])
    for chunk in [(0, 10, 62), (0, 99, 100), (0, 58, 64)]:
        _, first, end = chunk
        [result] = broken.attend(ops, [chunk])
        assert torch.equal(result.isnan(), after[first:end].isnan())
        assert same_bits(result.nan_to_num(7.0), after[first:end].nan_to_num(7.0))


@pytest.mark.parametrize("shape", [Shape(9, 3, 64), Shape(3, 1, 80), Shape(5, 5, 8)], ids=str)
@pytest.mark.parametrize("has_values", [False, True])
def test_results_come_quantised_too(ops, shape, has_values, halves) -> None:
    cache = Cache(shape, [40, 300]).fill(ops)
    chunks = [(0, 0, 40), (1, 299, 300)]
    query = torch.cat([cache.queries(*chunk) for chunk in chunks])
    batch = Batch(cache, chunks, query)
    plain = torch.cat(cache.attend(ops, chunks))
    num_rows, width = plain.shape
    expected, actual = (QuantisedRows(num_rows, width, halves) for _ in range(2))
    values = torch.zeros(num_rows, width)

    def quantise(library: Any, program: int) -> None:
        library.tl_add_quantise(
            program, TOKENS, plain.data_ptr(), plain.stride(0), width, expected.rows()
        )

    def attend(library: Any, program: int) -> None:
        batch.add(library, program, actual.rows(values if has_values else None))

    ops.run(quantise, num_rows)
    ops.run(attend, num_rows, 0, len(chunks))
    assert torch.equal(actual.quantised, expected.quantised)
    assert same_bits(actual.scales, expected.scales)
    assert same_bits(actual.sums, expected.sums)
    assert not has_values or same_bits(values, plain)


def test_one_plan_serves_layers_that_differ(best_ops) -> None:
    lengths = [900, 20]
    caches = [
        Cache(shape, lengths).fill(best_ops)
        for shape in [Shape(3, 3, 16), Shape(12, 1, 64, kind=INT8), Shape(4, 2, 64, window=100)]
    ]
    chunks = [(0, 899, 900), (1, 12, 20)]
    queries = [torch.cat([cache.queries(*chunk) for chunk in chunks]) for cache in caches]
    batches = [Batch(cache, chunks, query) for cache, query in zip(caches, queries, strict=True)]
    results = [aligned(*query.shape) for query in queries]

    def add(library: Any, program: int) -> None:
        plan = batches[0].plan(library, program)
        for cache, query, out in zip(caches, queries, results, strict=True):
            shape = cache.shape
            library.tl_add_attention(
                *(program, TOKENS, plan, query.data_ptr(), query.stride(0), shape.heads),
                *(cache.layer(), shape.scale, shape.window, plain_rows(out)),
            )

    best_ops.run(add, 9, 0, 2)
    for cache, result in zip(caches, results, strict=True):
        assert same_bits(result, torch.cat(cache.attend(best_ops, chunks)))


def test_a_plan_of_kept_sequences_looks_them_up(best_ops) -> None:
    cache = Cache(Shape(9, 3, 64), [30, 40, 50]).fill(best_ops)
    kept = torch.tensor([2, 0]).int()
    query = torch.cat([cache.queries(2, 48, 50), cache.queries(0, 29, 30)])
    cu_seqlens = torch.tensor([0, 2, 3]).int()
    seq_lens = torch.tensor(cache.lengths).int()
    out = aligned(*query.shape)

    def add(library: Any, program: int) -> None:
        plan = library.tl_add_attention_plan(
            *(program, KEPT_SEQUENCES, cu_seqlens.data_ptr(), seq_lens.data_ptr()),
            *(cache.block_table.data_ptr(), cache.block_table.shape[1], kept.data_ptr(), 16),
        )
        library.tl_add_attention(
            *(program, KEPT_TOKENS, plan, query.data_ptr(), query.stride(0), 9, cache.layer()),
            *(cache.shape.scale, 0, plain_rows(out)),
        )

    best_ops.run(add, 120, 3, 3, 2)
    assert same_bits(out, torch.cat(cache.attend(best_ops, [(2, 48, 50), (0, 29, 30)])))


def test_no_sequences_are_no_work(best_ops) -> None:
    cache = Cache(Shape(2, 1, 64), [30]).fill(best_ops)
    batch = Batch(cache, [(0, 0, 30)], cache.query)
    out = torch.zeros(30, 128)
    best_ops.run(lambda *program: batch.add(*program, plain_rows(out)), 0, 0, 0)
    assert not out.any()
