"""Batches for attention over a paged cache, with what no kernel may read full of NaN."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.attention import paged_attention
from kernels.gpu.attention_plan import GpuAttentionPlan, plan_attention
from kernels.gpu.kv_cache import GpuKvLayer, KvFormat
from kernels.reference import ReferenceKernels
from tests.fakes.gpu_tensors import read_cache


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequences of which the last tokens are queries: as a step gives them to attention."""

    query: Tensor
    kv_layer: GpuKvLayer
    cu_seqlens: Tensor
    seq_lens: Tensor
    block_table: Tensor

    def plan(self, rows: Tensor | None = None) -> GpuAttentionPlan:
        layout = self.cu_seqlens, self.seq_lens, self.block_table
        return plan_attention(*layout, self.kv_layer.block_size, rows)

    def attend(
        self,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        batch_invariant: bool = False,
        plan: GpuAttentionPlan | None = None,
    ) -> Tensor:
        out = torch.full_like(self.query, torch.nan)
        scale = self.query.shape[2] ** -0.5
        paged_attention(
            *(self.query, self.kv_layer, plan or self.plan(), scale, sliding_window, soft_cap),
            *(out, scratch_of(self.query.device), batch_invariant),
        )
        return out

    def expected(self, sliding_window: int = 0, soft_cap: float = 0.0) -> Tensor:
        """By the reference, from the cache's values as floats."""
        layout = self.cu_seqlens, self.seq_lens, self.block_table
        reference = ReferenceKernels()
        plan = reference.plan_attention(*layout, self.kv_layer.block_size)
        scale = self.query.shape[2] ** -0.5
        cache = read_cache(self.kv_layer)
        return reference.paged_attention(self.query, cache, plan, scale, sliding_window, soft_cap)

    def only(self, pieces: Sequence[tuple[int, int, int]]) -> "PagedBatch":
        """Pieces (sequence, first query, last) as sequences of their own; a length ends there."""
        device = self.query.device
        starts, lengths = self.cu_seqlens.tolist(), self.seq_lens.tolist()
        queries, seq_lens = [], []
        for sequence, first, last in pieces:
            start, end = starts[sequence], starts[sequence + 1]
            queries.append(self.query[start + first : start + last])
            seq_lens.append(lengths[sequence] - (end - start - last))
        sizes = torch.tensor([0, *(last - first for _, first, last in pieces)])
        rows = torch.tensor([sequence for sequence, _, _ in pieces], device=device)
        return PagedBatch(
            torch.cat(queries),
            self.kv_layer,
            sizes.cumsum(0).int().to(device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            self.block_table[rows],
        )


def scratch_of(device: torch.device) -> Callable[[str, tuple[int, ...], torch.dtype], Tensor]:
    """Memory that holds NaN, whatever it is asked for."""

    def scratch(purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    return scratch


def paged_batch(
    randn: Callable[..., Tensor],
    sequences: Sequence[tuple[int, int]],
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    kv_format: KvFormat | None = None,
) -> PagedBatch:
    """A batch of sequences (tokens, of which queries), in blocks that lie in any order.

    Table entries beyond a sequence's blocks are no blocks at all.
    """
    kv_format = kv_format or KvFormat(str(dtype).removeprefix("torch."))
    block_size = shape.block_size
    seq_lens = [tokens for tokens, _ in sequences]
    num_queries = [queries for _, queries in sequences]
    counts = [math.ceil(tokens / block_size) for tokens in seq_lens]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(2)).int()
    query = randn(sum(num_queries), shape.heads, shape.head_dim, dtype=dtype)
    device = query.device
    block_table = torch.full((len(sequences), max(*counts, 1)), 1 << 30, dtype=torch.int32)
    is_held = torch.zeros(len(order), block_size, dtype=torch.bool)
    first = 0
    for row, (tokens, count) in enumerate(zip(seq_lens, counts, strict=True)):
        blocks = order[first : first + count]
        block_table[row, :count] = blocks
        held = torch.arange(count * block_size) < tokens
        is_held[blocks.long()] = held.view(count, block_size)
        first += count
    kv_layer = _cache(randn, is_held.to(device), shape, kv_format)
    cu_seqlens = torch.tensor([0, *num_queries]).cumsum(0).int().to(device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return PagedBatch(query, kv_layer, cu_seqlens, lengths, block_table.to(device))


def _cache(
    randn: Callable[..., Tensor], is_held: Tensor, shape: Shape, kv_format: KvFormat
) -> GpuKvLayer:
    data = randn(2, *is_held.shape, shape.kv_heads, shape.head_dim)
    if not kv_format.has_scales:
        data[:, ~is_held] = torch.nan
        return GpuKvLayer(data.to(kv_format.dtype), None, kv_format)
    scales = data.abs().amax(-1) / kv_format.largest
    data = data / scales[..., None]
    scales[:, ~is_held] = torch.nan
    if kv_format == KvFormat.INT8:
        data = data.round()
    return GpuKvLayer(data.to(kv_format.dtype), scales, kv_format)
