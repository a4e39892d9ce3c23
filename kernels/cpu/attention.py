"""Paged attention on torch's CPU build: tiles of queries, batched by shape, over gathered keys.

A query's result has the same bits however its sequence is cut into steps and whatever shares the
batch. For that, which keys are read beside a query, masked ones included, is settled by its
position alone: positions are divided into ranges, and all queries of a range read the same keys.
And products have a multiple of four rows: of those, MKL computes each alike, while it gives what is
left over of four to routines that sum in another order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# Ranges of positions end at these, and beyond the last at its distance from the one before. Longer
# ranges make fewer shapes to run one after the other, shorter ones less padding: past the first
# two, it is at most half of what is read.
_RANGE_ENDS = (0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# The most queries of a tile: what is computed above the diagonal grows with it.
_QUERY_TILE = 128
# Keys gathered in one call: keeps the copies (12 MiB at this size for 3 heads of 64, float32) in
# the last-level cache.
_MAX_GATHERED_KEYS = 8192

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one padded shape, [B] tiles of Q queries and L keys, that run in one call."""

    query_indices: Tensor | None  # [B · Q] of the flat batch; None: all of it, in order
    kv_slots: Tensor  # [B · L]
    mask: Tensor  # [B, 1, Q, L]: 0 where a query sees a key, else -inf
    kept: Tensor | None  # of the B · Q results those that are not padding; None: all
    output_indices: Tensor | None  # where in the flat batch the kept results go


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The layout of a step's attention; tiles are made when a layer first asks for its window."""

    first_queries: Integers
    num_queries: Integers
    seq_lens: Integers
    block_table: Integers
    block_size: int
    tiles_by_window: dict[int, list[_Tiles]] = field(default_factory=dict)

    def tiles(self, sliding_window: int) -> list[_Tiles]:
        if sliding_window not in self.tiles_by_window:
            self.tiles_by_window[sliding_window] = list(_make_tiles(self, sliding_window))
        return self.tiles_by_window[sliding_window]


def plan(cu_seqlens: Tensor, seq_lens: Tensor, block_table: Tensor, block_size: int) -> PagedPlan:
    """See `Kernels.plan_attention`."""
    borders = cu_seqlens.numpy().astype(np.int64)
    return PagedPlan(
        borders[:-1],
        np.diff(borders),
        seq_lens.numpy().astype(np.int64),
        block_table.numpy().astype(np.int64),
        block_size,
    )


class PagedAttention:
    """Runs plans; owns the buffers that keys and values are gathered into."""

    def __init__(self) -> None:
        self._gathered = (torch.empty(0), torch.empty(0))

    def __call__(
        self, query: Tensor, kv_layer: Tensor, plan: PagedPlan, scale: float, sliding_window: int
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        result = None
        for tiles in plan.tiles(sliding_window):
            attended = self._attend(query, kv_layer, tiles, scale)
            if tiles.output_indices is None:
                return attended
            if result is None:
                result = torch.empty_like(query)
            if tiles.kept is not None:
                attended = attended[tiles.kept]
            result.index_copy_(0, tiles.output_indices, attended)
        assert result is not None, "a plan has at least one query"
        return result

    def _attend(self, query: Tensor, kv_layer: Tensor, tiles: _Tiles, scale: float) -> Tensor:
        num_tiles, _, num_queries, num_keys = tiles.mask.shape
        heads, dim = query.shape[1:]
        kv_heads = kv_layer.shape[3]
        if tiles.query_indices is not None:
            query = query[tiles.query_indices]
        key, value = (
            rows.view(num_tiles, num_keys, kv_heads, dim).transpose(1, 2)
            for rows in self._gather(kv_layer, tiles.kv_slots)
        )
        mask = tiles.mask.to(query.dtype)
        if num_queries == 1:
            # The heads that share a KV head become the queries of one product.
            group = heads // kv_heads
            query = query.view(num_tiles, kv_heads, group, dim)
            if group % 4:
                query = F.pad(query, (0, 0, 0, -group % 4))
            attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
            return attended[:, :, :group].reshape(num_tiles, heads, dim)
        query = query.view(num_tiles, num_queries, heads, dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(num_tiles * num_queries, heads, dim)

    def _gather(self, kv_layer: Tensor, slots: Tensor) -> Iterator[Tensor]:
        rows = kv_layer.flatten(3).flatten(1, 2)
        size = len(slots) * rows.shape[2]
        if self._gathered[0].numel() < size or self._gathered[0].dtype != rows.dtype:
            # Fresh memory on each call would cost more in page faults than the copy itself.
            self._gathered = (
                torch.empty(size, dtype=rows.dtype),
                torch.empty(size, dtype=rows.dtype),
            )
        for source, buffer in zip(rows, self._gathered, strict=True):
            target = buffer[:size].view(len(slots), rows.shape[2])
            yield torch.index_select(source, 0, slots, out=target)


def _make_tiles(plan: PagedPlan, sliding_window: int) -> Iterator[_Tiles]:
    range_ends = _range_ends(int(plan.seq_lens.max()))
    sequences, first_positions, num_queries = _cut(plan, range_ends)
    positions_before = first_positions - (plan.seq_lens - plan.num_queries)[sequences]
    first_queries = plan.first_queries[sequences] + positions_before
    ranges = np.searchsorted(range_ends, first_positions, side="right")
    first_keys = np.zeros_like(first_positions)
    if sliding_window:
        first_keys = np.maximum(range_ends[ranges - 1] + 1 - sliding_window, 0)
    padded_keys = range_ends[ranges] - first_keys
    padded_queries = np.where(num_queries == 1, 1, _padded_queries(num_queries))
    order = np.lexsort((padded_keys, padded_queries))
    shapes = np.stack([padded_queries, padded_keys])[:, order]
    borders = np.flatnonzero(np.any(np.diff(shapes, axis=1), axis=0)) + 1
    for same_shape in np.split(order, borders):
        shape = int(padded_queries[same_shape[0]]), int(padded_keys[same_shape[0]])
        at_once = max(1, _MAX_GATHERED_KEYS // shape[1])
        for start in range(0, len(same_shape), at_once):
            chosen = np.sort(same_shape[start : start + at_once])
            yield _batch_tiles(
                plan,
                shape,
                sequences[chosen],
                first_queries[chosen],
                num_queries[chosen],
                first_positions[chosen],
                first_keys[chosen],
                sliding_window,
            )


def _range_ends(max_position: int) -> Integers:
    """The ends of all ranges up to one beyond `max_position`."""
    last = _RANGE_ENDS[-1]
    step = last - _RANGE_ENDS[-2]
    return np.concatenate([_RANGE_ENDS, np.arange(last + step, max_position + 2 * step, step)])


def _cut(plan: PagedPlan, range_ends: Integers) -> tuple[Integers, Integers, Integers]:
    """Tiles: their sequence, position of the first query, and number of queries.

    None reaches over the end of a range or over a multiple of _QUERY_TILE.
    """
    ends = np.union1d(range_ends, np.arange(0, range_ends[-1], _QUERY_TILE))
    first_positions = plan.seq_lens - plan.num_queries
    first_tiles = np.searchsorted(ends, first_positions, side="right")
    num_tiles = np.searchsorted(ends, plan.seq_lens - 1, side="right") - first_tiles + 1
    sequences = np.repeat(np.arange(len(num_tiles)), num_tiles)
    tiles_before = np.cumsum(num_tiles) - num_tiles
    tiles = first_tiles[sequences] + np.arange(len(sequences)) - tiles_before[sequences]
    starts = np.maximum(ends[tiles - 1], first_positions[sequences])
    stops = np.minimum(ends[tiles], plan.seq_lens[sequences])
    return sequences, starts, stops - starts


def _padded_queries(num_queries: Integers) -> Integers:
    """Up to 4 · {1, 2, 3, 4, 6, 8, 12, 16, …}: at most half as many again, few sizes."""
    fours = -(-num_queries // 4)
    power = 1 << np.ceil(np.log2(fours)).astype(np.int64)
    return 4 * np.where(4 * fours <= 3 * power, 3 * power // 4, power)


def _batch_tiles(
    plan: PagedPlan,
    shape: tuple[int, int],
    sequences: Integers,
    first_queries: Integers,
    num_queries: Integers,
    first_positions: Integers,
    first_keys: Integers,
    sliding_window: int,
) -> _Tiles:
    # Padding repeats a tile's last query, and behind the mask its sequence's last key: a masked
    # key's weight is 0, but 0 times what another sequence left in the cache could be NaN.
    query_offsets = np.arange(shape[0])
    is_query = query_offsets < num_queries[:, None]
    query_offsets = np.minimum(query_offsets, num_queries[:, None] - 1)
    query_indices = first_queries[:, None] + query_offsets
    query_positions = first_positions[:, None] + query_offsets

    key_offsets = np.arange(shape[1])
    key_positions = first_keys[:, None] + key_offsets
    read_positions = np.minimum(key_positions, plan.seq_lens[sequences, None] - 1)
    blocks = plan.block_table[sequences[:, None], read_positions // plan.block_size]
    slots = blocks * plan.block_size + read_positions % plan.block_size

    hidden = key_positions[:, None] > query_positions[..., None]
    if sliding_window:
        hidden |= key_positions[:, None] <= query_positions[..., None] - sliding_window
    mask = np.where(hidden[:, None], np.float32(-np.inf), np.float32(0))

    output_indices = query_indices[is_query]
    num_batch_queries = int(plan.num_queries.sum())
    is_whole_batch = query_indices.size == num_batch_queries and np.array_equal(
        query_indices.ravel(), np.arange(num_batch_queries)
    )
    return _Tiles(
        query_indices=None if is_whole_batch else torch.from_numpy(query_indices.ravel()),
        kv_slots=torch.from_numpy(slots.ravel()),
        mask=torch.from_numpy(mask),
        kept=None if is_query.all() else torch.from_numpy(np.flatnonzero(is_query)),
        output_indices=None if is_whole_batch else torch.from_numpy(output_indices),
    )
