"""Norm of queries and keys, rotary embedding and the write to the KV cache, in one kernel.

The halves (a, b) of a head become (a cos - b sin, b cos + a sin) (Su et al., 2021), after the head
is rms-normalised where a model has weights for that (Henry et al., 2020). A program has one token
and some of its heads, queries or keys and values, in registers; it reads and writes each once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.kv_cache import GpuKvLayer
from kernels.gpu.kv_write import write_heads
from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.variant import ModelShapes, Variant

# Of heads that one program holds: more fill the device no better, and take more registers.
_LARGEST_TILE = 4096
_MAX_WARPS = 8
# 16 bytes of 16-bit elements of each half.
_ELEMENTS_PER_LANE = 8


@triton.jit
def _rotated(
    places,
    mask,
    norm,
    cos_sin,
    eps,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The halves, float32 [heads, BLOCK], of the heads whose first halves lie at `places`."""
    dims = tl.arange(0, BLOCK)[None, :]
    in_half = dims < HALF
    a = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a + b * b, axis=1)
        scales = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        a *= scales * tl.load(norm + dims, mask=in_half, other=0.0).to(tl.float32)
        b *= scales * tl.load(norm + HALF + dims, mask=in_half, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + dims, mask=in_half, other=0.0)
    sin = tl.load(cos_sin + HALF + dims, mask=in_half, other=0.0)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate_query(
    query,
    position,
    cos_sin_table,
    norm,
    out,
    heads,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Writes `heads` [tile, 1] of the token that lies at `query` to `out`."""
    dims = tl.arange(0, BLOCK)[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    offsets = heads * (2 * HALF) + dims
    cos_sin = cos_sin_table + position * (2 * HALF)
    a, b = _rotated(query + offsets, mask, norm, cos_sin, eps, HALF, BLOCK, HAS_NORM)
    tl.store(out + offsets, a.to(out.dtype.element_ty), mask=mask)
    tl.store(out + offsets + HALF, b.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _cache_token(
    key,
    value,
    position,
    slot,
    cos_sin_table,
    norm,
    caches,
    heads,
    eps,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Writes `heads` [tile, 1] of the token that lies at `key` and `value` to its slot."""
    key_cache, value_cache, key_scales, value_scales = caches
    dims = tl.arange(0, BLOCK)[None, :]
    in_heads = heads < KV_HEADS
    mask = in_heads & (dims < HALF)
    offsets = heads * (2 * HALF) + dims
    cells = slot * KV_HEADS + heads
    cos_sin = cos_sin_table + position * (2 * HALF)
    a, b = _rotated(key + offsets, mask, norm, cos_sin, eps, HALF, BLOCK, HAS_NORM)
    write_heads(key_cache, key_scales, cells, in_heads, a, b, HALF, BLOCK, LARGEST)
    a = tl.load(value + offsets, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(value + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    write_heads(value_cache, value_scales, cells, in_heads, a, b, HALF, BLOCK, LARGEST)


@triton.jit(do_not_specialize=["num_queries"])
def _rope_kernel(
    query,
    query_positions,
    key,
    value,
    key_positions,
    cos_sin_table,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,
    query_norm,
    key_norm,
    out,
    query_stride,
    key_stride,
    value_stride,
    out_stride,
    num_queries,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    KV_HEADS_TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    program, part = tl.program_id(0), tl.program_id(1)
    if program < num_queries:
        row = program.to(tl.int64)
        position = tl.load(query_positions + row).to(tl.int64)
        heads = part * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
        places = query + row * query_stride
        outs = out + row * out_stride
        _rotate_query(
            *(places, position, cos_sin_table, query_norm, outs, heads, eps),
            *(HEADS, HALF, BLOCK, HAS_NORM),
        )
    else:
        token = (program - num_queries).to(tl.int64)
        slot = tl.load(slot_mapping + token).to(tl.int64)
        # Padding has no slot.
        if slot >= 0:
            keys, values = key + token * key_stride, value + token * value_stride
            caches = key_cache, value_cache, key_scales, value_scales
            key_position = tl.load(key_positions + token).to(tl.int64)
            kv_heads = part * KV_HEADS_TILE + tl.arange(0, KV_HEADS_TILE)[:, None]
            _cache_token(
                *(keys, values, key_position, slot, cos_sin_table, key_norm, caches),
                *(kv_heads, eps, KV_HEADS, HALF, BLOCK, HAS_NORM, LARGEST),
            )


@dataclass(frozen=True, slots=True)
class HeadTile:
    """What one program works on: heads of one token, each half padded to `block` elements."""

    heads: int
    kv_heads: int
    block: int
    num_warps: int


def choose_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> HeadTile:
    block = triton.next_power_of_2(head_dim // 2)
    most = max(1, _LARGEST_TILE // (2 * block))
    heads = min(most, triton.next_power_of_2(num_heads))
    kv_heads = min(most, triton.next_power_of_2(num_kv_heads))
    num_warps = heads * block // (32 * _ELEMENTS_PER_LANE)
    return HeadTile(heads, kv_heads, block, max(1, min(_MAX_WARPS, num_warps)))


def rope_and_cache(
    query: Tensor,
    query_positions: Tensor,
    key: Tensor,
    value: Tensor,
    key_positions: Tensor,
    cos_sin_table: Tensor,
    kv_layer: GpuKvLayer,
    slot_mapping: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    out: Tensor,
) -> None:
    """Rotates `query` into out [Tq, heads, dim]; key and value [T, kv_heads, dim] go to the cache.

    As `Kernels.rope_and_cache` says. A token's heads lie one after the other; tokens may lie apart,
    as in a fused projection. A slot of -1 is not written. `out` may be `query`.
    """
    num_queries, num_heads, head_dim = query.shape
    num_tokens, num_kv_heads, _ = key.shape
    assert value.shape == key.shape and out.shape == query.shape
    assert all(x.stride(2) == 1 and _heads_adjoin(x) for x in (query, key, value, out))
    assert cos_sin_table.is_contiguous() and cos_sin_table.shape[1] == head_dim
    assert (query_norm is None) == (key_norm is None)
    assert kv_layer.data.is_contiguous() and kv_layer.num_kv_heads == num_kv_heads
    if num_queries + num_tokens == 0:
        return
    tile = choose_tile(num_heads, num_kv_heads, head_dim)
    parts = max(triton.cdiv(num_heads, tile.heads), triton.cdiv(num_kv_heads, tile.kv_heads))
    key_cache, value_cache = kv_layer.stored()
    key_scales, value_scales = (None, None) if kv_layer.scales is None else kv_layer.scales
    _rope_kernel[(num_queries + num_tokens, parts)](
        *(query, query_positions, key, value, key_positions, cos_sin_table),
        *(key_cache, value_cache, key_scales, value_scales, slot_mapping),
        *(query_norm, key_norm, out),
        *(query.stride(0), key.stride(0), value.stride(0), out.stride(0)),
        num_queries,
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK=tile.block,
        HEADS_TILE=tile.heads,
        KV_HEADS_TILE=tile.kv_heads,
        HAS_NORM=query_norm is not None,
        LARGEST=kv_layer.format.largest,
        num_warps=tile.num_warps,
    )


def _heads_adjoin(x: Tensor) -> bool:
    return x.shape[1] == 1 or x.stride(1) == x.shape[2]


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches."""
    yield _variant(shapes, torch.int32)


def _variant(shapes: ModelShapes, indices: torch.dtype) -> Variant:
    tile = choose_tile(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim)
    kv_format = shapes.kv_format
    elements = pointer_type(shapes.dtype)
    strides = ("query_stride", "key_stride", "value_stride", "out_stride")
    index_tensors = ("query_positions", "key_positions", "slot_mapping")
    norms, scales = ("query_norm", "key_norm"), ("key_scales", "value_scales")
    signature = {
        **dict.fromkeys(("query", "key", "value", "out"), elements),
        **dict.fromkeys(index_tensors, pointer_type(indices)),
        **dict.fromkeys(("key_cache", "value_cache"), pointer_type(kv_format.stored_dtype)),
        "cos_sin_table": "*fp32",
        **(dict.fromkeys(norms, elements) if shapes.qk_norm else {}),
        **(dict.fromkeys(scales, "*fp32") if kv_format.has_scales else {}),
        **dict.fromkeys(strides, "i32"),
        "num_queries": "i32",
        "eps": "fp32",
    }
    return Variant(
        kernel=_rope_kernel,
        label=f"rope_and_cache {elements} KV {kv_format} {shapes.num_heads}/{shapes.num_kv_heads} "
        f"heads of {shapes.head_dim}{', with norms' * shapes.qk_norm}",
        signature=signature,
        constexprs={
            **({} if shapes.qk_norm else dict.fromkeys(norms)),
            **({} if kv_format.has_scales else dict.fromkeys(scales)),
            "HEADS": shapes.num_heads,
            "KV_HEADS": shapes.num_kv_heads,
            "HALF": shapes.head_dim // 2,
            "BLOCK": tile.block,
            "HEADS_TILE": tile.heads,
            "KV_HEADS_TILE": tile.kv_heads,
            "HAS_NORM": shapes.qk_norm,
            "LARGEST": kv_format.largest,
        },
        num_warps=tile.num_warps,
        divisible_by_16=strides if shapes.head_dim % 16 == 0 else (),
    )
