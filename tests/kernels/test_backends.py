"""Every op of the CPU backend against the reference, over odd shapes, a tolerance per dtype."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import KernelConfig, Kernels, select_kernels
from kernels.reference import ReferenceKernels

DTYPES = [torch.float32, torch.bfloat16]
# Relative to the largest value of the reference: rounding of a few sums, or of one bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
NUM_TOKENS = [1, 2, 3, 17, 130]
EPS = 1e-5


@pytest.fixture
def kernels() -> Kernels:
    return torch_kernels(torch.float32)


@pytest.fixture
def reference() -> Kernels:
    return ReferenceKernels()


def torch_kernels(dtype: torch.dtype) -> Kernels:
    weights = str(dtype).removeprefix("torch.")
    config = KernelConfig(weights=weights, implementation="torch")
    return select_kernels(torch.device("cpu"), config)


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return draw


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs().max()
    assert difference <= TOLERANCE[actual.dtype] * max(1.0, float(expected.double().abs().max()))


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        select_kernels(torch.device("meta"))


@pytest.mark.parametrize(
    "config",
    [
        KernelConfig(weights="int8", implementation="torch"),
        KernelConfig(kv="int8", implementation="torch"),
        KernelConfig(weights="bfloat16", kv="float32", implementation="torch"),
    ],
)
def test_what_torch_does_not_compute_with_is_refused_in_one_line(config: KernelConfig) -> None:
    with pytest.raises(ValueError, match="torch's own kernels"):
        select_kernels(torch.device("cpu"), config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("rows", "columns"), [(96, 33), (7, 64), (258, 64), (129, 200)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(reference, randn, dtype, num_tokens, rows, columns, has_bias) -> None:
    kernels = torch_kernels(dtype)
    x = randn(num_tokens, columns, dtype=dtype)
    weight = randn(rows, columns, dtype=dtype)
    bias = randn(rows, dtype=dtype) if has_bias else None
    expected = reference.linear(x, (weight, bias))
    assert_close(kernels.linear(x, kernels.pack_linear([weight], bias)), expected)
    parts = list(weight.float().split([rows // 3, rows - rows // 3]))
    assert_close(kernels.linear(x, kernels.pack_linear(parts, bias)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_and_tied_head(reference, randn, dtype) -> None:
    kernels = torch_kernels(dtype)
    table, ids = randn(19, 33, dtype=dtype), torch.tensor([18, 0, 0, 7])
    packed = kernels.pack_embedding(table)
    for indices in (ids, ids.int()):
        assert torch.equal(kernels.embedding(indices, packed), table[ids])
    x = randn(3, 33, dtype=dtype)
    expected = reference.linear(x, (table, None))
    assert_close(kernels.linear(x, kernels.tied_head(packed)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_take_rows(kernels, randn, dtype) -> None:
    x, indices = randn(5, 7, dtype=dtype), torch.tensor([3, 3, 0], dtype=torch.int32)
    assert torch.equal(kernels.take_rows(x, indices), x[[3, 3, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("width", [33, 64, 576])
def test_rms_norm_and_add_rms_norm(kernels, reference, randn, dtype, num_tokens, width) -> None:
    x, weight = randn(num_tokens, width, dtype=dtype), randn(width, dtype=dtype)
    assert_close(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    residual = randn(num_tokens, width, dtype=dtype)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, EPS)
    assert_close(kernels.add_rms_norm(x, residual, weight, EPS), expected)
    assert_close(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("width", [7, 96])
def test_silu_and_mul(kernels, reference, randn, dtype, num_tokens, width) -> None:
    gate_up = randn(num_tokens, 2 * width, dtype=dtype) * 4
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
    assert_close(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (4, 1, 80)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_and_cache(
    kernels, reference, randn, dtype, num_tokens, heads, kv_heads, dim, has_norms
) -> None:
    block_size, num_blocks = 16, 12
    projected = randn(num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    query, key, value = projected.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    angles = randn(300, dim // 2) * 100
    cos_sin_table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(300, (num_tokens,), generator=generator)
    queries = torch.arange(0, num_tokens, 2)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].int()
    norms = [randn(dim, dtype=dtype), randn(dim, dtype=dtype)] if has_norms else [None, None]

    def run(ops: Kernels) -> tuple[Tensor, Tensor]:
        kv_layer = torch.zeros(2, num_blocks, block_size, kv_heads, dim, dtype=dtype)
        rotated = ops.rope_and_cache(
            query[queries].clone(),
            positions[queries],
            key.clone(),
            value,
            positions,
            cos_sin_table,
            kv_layer,
            slots,
            *norms,
            EPS,
        )
        return rotated, kv_layer

    for actual, expected in zip(run(kernels), run(reference), strict=True):
        assert_close(actual, expected)


# (tokens of a sequence, of which queries): decode, prefill, chunks, block borders, several tiles.
BATCHES = {
    "one token": [(1, 1)],
    "decode": [(5, 1), (16, 1), (17, 1), (33, 1), (100, 1), (1, 1), (16, 1)],
    "prefill": [(7, 7), (16, 16), (17, 17), (150, 150)],
    "chunks": [(40, 8), (33, 17), (300, 140), (16, 15)],
    "mixture": [(90, 1), (20, 20), (64, 1), (50, 13), (15, 1), (135, 130)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 16), (2, 2, 80)])
@pytest.mark.parametrize("sliding_window", [0, 1, 24])
def test_paged_attention(
    kernels, reference, randn, dtype, batch, heads, kv_heads, dim, sliding_window
) -> None:
    query, kv_layer, layout = paged_batch(randn, batch, heads, kv_heads, dim, dtype)
    actual, expected = (
        ops.paged_attention(
            query, kv_layer, ops.plan_attention(*layout, 16), dim**-0.5, sliding_window
        )
        for ops in (kernels, reference)
    )
    assert_close(actual, expected)
    # The same batch by rows of larger tables.
    cu_seqlens, seq_lens, block_table = layout
    rows = torch.randperm(len(batch) + 3, generator=torch.Generator().manual_seed(3))[: len(batch)]
    all_lens, all_blocks = torch.full((len(batch) + 3,), 99), torch.zeros(len(batch) + 3, 50).int()
    all_lens[rows] = seq_lens
    all_blocks[rows, : block_table.shape[1]] = block_table.int()
    plan = kernels.plan_attention(cu_seqlens, all_lens, all_blocks, 16, rows)
    again = kernels.paged_attention(query, kv_layer, plan, dim**-0.5, sliding_window)
    assert torch.equal(again, actual)


def paged_batch(
    randn: Callable[..., Tensor],
    batch: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A query, a cache whose slots beyond every sequence are NaN, and the layout of the batch."""
    block_size = 16
    seq_lens = torch.tensor([tokens for tokens, _ in batch])
    num_queries = torch.tensor([0, *(queries for _, queries in batch)])
    max_blocks = -(-int(seq_lens.max()) // block_size)
    shuffled = torch.randperm(len(batch) * max_blocks, generator=torch.Generator().manual_seed(2))
    block_table = shuffled.view(len(batch), max_blocks)
    kv_layer = randn(2, len(shuffled), block_size, kv_heads, dim, dtype=dtype)
    for row, seq_len in enumerate(seq_lens.tolist()):
        for position in range(seq_len, max_blocks * block_size):
            kv_layer[:, block_table[row, position // block_size], position % block_size] = torch.nan
    query = randn(int(num_queries.sum()), heads, dim, dtype=dtype)
    return query, kv_layer, (num_queries.cumsum(0), seq_lens, block_table)


def test_a_row_is_bit_equal_alone_and_among_others(kernels, randn) -> None:
    width, rows = 96, 601
    x, weight = randn(rows, width), randn(width)
    gate_up = randn(rows, 2 * width)
    packed = kernels.pack_linear([randn(48, width)])
    ops: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: kernels.linear(x, packed), x),
        (lambda x: kernels.rms_norm(x, weight, EPS), x),
        (lambda x: kernels.add_rms_norm(x, torch.ones_like(x), weight, EPS), x),
        (kernels.silu_and_mul, gate_up),
    ]
    for op, batch in ops:
        whole = op(batch)
        for first, size in [(0, 1), (600, 1), (5, 2), (7, 33), (100, 257), (2, 599)]:
            part = op(batch[first : first + size].clone())
            assert torch.equal(part, whole[first : first + size])


def test_rope_gives_a_token_the_same_bits_alone_and_among_others(kernels, randn) -> None:
    tokens, heads, dim = 301, 3, 80
    query, key, angles = randn(tokens, heads, dim), randn(tokens, 1, dim), randn(tokens, dim // 2)
    cos_sin_table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.arange(tokens)
    norms = randn(dim), randn(dim)

    def run(chosen: slice) -> tuple[Tensor, Tensor]:
        kv_layer = torch.zeros(2, 19, 16, 1, dim)
        rotated = kernels.rope_and_cache(
            query[chosen].clone(),
            positions[chosen],
            key[chosen].clone(),
            key[chosen],
            positions[chosen],
            cos_sin_table,
            kv_layer,
            positions[chosen],
            *norms,
            EPS,
        )
        return rotated, kv_layer.flatten(1, 2)[0, chosen]

    whole = run(slice(0, tokens))
    for first, size in [(0, 1), (300, 1), (5, 2), (7, 33), (100, 177)]:
        chosen = slice(first, first + size)
        for part, all_tokens in zip(run(chosen), whole, strict=True):
            assert torch.equal(part, all_tokens[chosen])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 16), (2, 2, 80)])
@pytest.mark.parametrize("sliding_window", [0, 24])
def test_attention_gives_a_query_the_same_bits_in_any_batch_and_chunk(
    kernels, randn, heads, kv_heads, dim, sliding_window
) -> None:
    lengths = [1, 31, 33, 150, 600]
    query, kv_layer, (cu_seqlens, _, block_table) = paged_batch(
        randn, [(n, n) for n in lengths], heads, kv_heads, dim, torch.float32
    )

    def attend(pieces: list[tuple[int, int, int]]) -> list[Tensor]:
        """Runs pieces (row, first position, one after the last) as the sequences of one batch."""
        rows = torch.tensor([row for row, _, _ in pieces])
        sizes = [last - first for _, first, last in pieces]
        plan = kernels.plan_attention(
            torch.tensor([0, *sizes]).cumsum(0),
            torch.tensor([last for _, _, last in pieces]),
            block_table[rows],
            16,
        )
        queries = [query[cu_seqlens[row] :][first:last] for row, first, last in pieces]
        attended = kernels.paged_attention(
            torch.cat(queries), kv_layer, plan, dim**-0.5, sliding_window
        )
        return list(attended.split(sizes))

    whole = attend([(row, 0, length) for row, length in enumerate(lengths)])
    pieces = [(4, 599, 600), (3, 149, 150), (2, 32, 33), (4, 100, 357), (3, 0, 16), (1, 30, 31)]
    for batch in [
        pieces,
        *([piece] for piece in pieces),
        [(4, p, p + 1) for p in range(0, 600, 7)],
    ]:
        for (row, first, last), actual in zip(batch, attend(batch), strict=True):
            assert torch.equal(actual, whole[row][first:last])
