"""Sequences in the native library's KV cache, and their attention in plain sums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.library import KvLayer, Rotary, Rows
from tests.fakes.native_ops import NativeOps, aligned, plain_rows

F16, F32, INT8 = range(3)
TOKENS, KEPT_TOKENS, SEQUENCES, KEPT_SEQUENCES = range(4)
STORED = {F16: torch.float16, F32: torch.float32, INT8: torch.int8}
NAMES = {F16: "float16", F32: "float32", INT8: "int8"}
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """A layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    kind: int = F16
    window: int = 0

    def __str__(self) -> str:
        sizes = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        return f"{sizes}-block{self.block_size}-{NAMES[self.kind]}-window{self.window}"

    @property
    def lanes(self) -> int:
        return -(-self.block_size // 16) * 16

    @property
    def width(self) -> int:
        return -(-self.head_dim // 16) * 16

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class Cache:
    """Sequences whose keys and values lie in a cache, between slots full of NaN."""

    shape: Shape
    lengths: Sequence[int]
    seed: int = 0
    has_norm: bool = False
    memory: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(self.seed)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator)

        num_tokens, longest = sum(self.lengths), max(self.lengths)
        self.query = randn(num_tokens, shape.heads * shape.head_dim)
        self.key = randn(num_tokens, shape.kv_heads * shape.head_dim)
        self.value = randn(num_tokens, shape.kv_heads * shape.head_dim)
        self.cos_sin = randn(longest, shape.head_dim)
        self.norm = randn(shape.head_dim)
        self.positions = torch.cat([torch.arange(length) for length in self.lengths]).int()
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        blocks = [-(-length // shape.block_size) for length in self.lengths]
        self.num_blocks = sum(blocks) + 2
        # Blocks lie alike for each shape of a layer.
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).int()
        self.block_table = torch.full((len(blocks), max(blocks) + 1), -(2**30), dtype=torch.int32)
        for row, count in enumerate(blocks):
            first = sum(blocks[:row])
            self.block_table[row, :count] = order[first : first + count]
        sequence = torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(self.lengths))
        block = self.block_table[sequence, self.positions // shape.block_size]
        self.slots = block * shape.block_size + self.positions % shape.block_size

    def layer(self) -> KvLayer:
        shape = self.shape
        return KvLayer(
            self.memory.data_ptr(), shape.kind, shape.block_size, shape.kv_heads, shape.head_dim
        )

    def rotary(self) -> Rotary:
        norm = self.norm.data_ptr() if self.has_norm else None
        return Rotary(self.cos_sin.data_ptr(), self.positions.data_ptr(), norm, EPS)

    def fill(self, ops: NativeOps) -> "Cache":
        """Writes all keys and values."""
        shape = self.shape
        block_bytes = ops.library.tl_kv_block_bytes(
            shape.kind, shape.block_size, shape.kv_heads, shape.head_dim
        )
        self.memory = aligned(self.num_blocks, block_bytes, dtype=torch.uint8).fill_(0xFF)

        def add(library: Any, program: int) -> None:
            library.tl_add_rope_and_cache(
                *(program, TOKENS, self.key.data_ptr(), self.key.stride(0)),
                *(self.value.data_ptr(), self.value.stride(0)),
                *(self.rotary(), self.layer(), self.slots.data_ptr()),
            )

        ops.run(add, len(self.key))
        return self

    def stored(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a sequence as the cache has them, float64 [length, heads, dim]."""
        shape, dtype = self.shape, STORED[self.shape.kind]
        heads = self.memory.view(self.num_blocks, shape.kv_heads, -1)
        num_keys, num_values = shape.head_dim * shape.lanes, shape.block_size * shape.width

        def parts(*sizes_and_types: tuple[int, torch.dtype]) -> Iterator[Tensor]:
            offset = 0
            for size, kind in sizes_and_types:
                length = size * kind.itemsize
                yield heads[..., offset : offset + length].contiguous().view(kind)
                offset += -(-length // 64) * 64

        scales = shape.lanes if shape.kind == INT8 else 0
        keys, values, key_scales, value_scales = parts(
            (num_keys, dtype),
            (num_values, dtype),
            (scales, torch.float32),
            (scales, torch.float32),
        )
        keys = keys.unflatten(-1, (shape.head_dim, shape.lanes)).transpose(-1, -2).double()
        values = values.unflatten(-1, (shape.block_size, shape.width)).double()
        if scales:
            keys = keys * key_scales[..., None].double()
            values = values * value_scales[..., : shape.block_size, None].double()
        length = self.lengths[sequence]
        slots = self.slots[self.starts[sequence] :][:length]
        block, offset = slots // shape.block_size, slots % shape.block_size
        return keys[block, :, offset], values[block, :, offset, : shape.head_dim]

    def expected(self, sequence: int) -> Tensor:
        """Attention of all tokens of a sequence, float64 [length, heads · dim]."""
        shape, length = self.shape, self.lengths[sequence]
        keys, values = self.stored(sequence)
        group = shape.heads // shape.kv_heads
        query = self.queries(sequence, 0, length).double().unflatten(1, (shape.heads, -1))
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * shape.scale
        age = torch.arange(length)[:, None] - torch.arange(length)
        is_seen = (age >= 0) & (age < (shape.window or length))
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    def queries(self, sequence: int, first: int, end: int) -> Tensor:
        start = self.starts[sequence]
        return self.query[start + first : start + end]

    def attend(self, ops: NativeOps, chunks: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """The attention of positions [first, end) of sequences, for each (sequence, first, end)."""
        query = torch.cat([self.queries(*chunk) for chunk in chunks])
        out = aligned(*query.shape)
        batch = Batch(self, chunks, query)
        ops.run(lambda *program: batch.add(*program, plain_rows(out)), len(query), 0, len(chunks))
        return list(out.split([end - first for _, first, end in chunks]))


class Batch:
    """The tensors of a batch, which outlive its program."""

    def __init__(self, cache: Cache, chunks: Sequence[tuple[int, int, int]], query: Tensor) -> None:
        lengths = torch.tensor([0, *(end - first for _, first, end in chunks)])
        self.cache, self.query = cache, query
        self.cu_seqlens = lengths.cumsum(0).int()
        self.seq_lens = torch.tensor([end for *_, end in chunks]).int()
        self.block_table = cache.block_table[[sequence for sequence, *_ in chunks]].contiguous()

    def plan(self, library: Any, program: int) -> int:
        return library.tl_add_attention_plan(
            *(program, SEQUENCES, self.cu_seqlens.data_ptr(), self.seq_lens.data_ptr()),
            *(self.block_table.data_ptr(), self.block_table.shape[1], None),
            self.cache.shape.block_size,
        )

    def add(self, library: Any, program: int, out: Rows) -> None:
        shape = self.cache.shape
        library.tl_add_attention(
            *(program, TOKENS, self.plan(library, program), self.query.data_ptr()),
            *(self.query.stride(0), shape.heads, self.cache.layer()),
            *(shape.scale, shape.window, out),
        )


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.view(torch.int32), expected.view(torch.int32))
