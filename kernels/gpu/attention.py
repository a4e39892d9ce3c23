"""Causal attention over the paged KV cache: prefill, chunks of it, decode, and mixtures of these.

out = softmax(scale · q kᵀ) v for each query over the keys before it (Kwon et al., 2023; the loop is
in attention_loop.py). A program has the queries of BLOCK_Q successive tokens for all query heads
of one KV head, so that a key is read once for all of these (Ainslie et al., 2023). It finds its
sequence itself, in cu_seqlens: no more than T // BLOCK_Q + n programs per KV head are launched,
whatever the lengths are. Sequences of one query are left to split_attention.py.

Batch-invariant mode has one tile for all batches, and computes keys in splits that end where
position says, one after the other or side by side: a row's bits are the same in every batch.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import merged_attention, split_attention
from kernels.gpu.attention_call import AttentionCall, Scratch, form_constexprs, form_variant
from kernels.gpu.attention_loop import (
    attend,
    attend_in_splits,
    attended,
    find_sequence,
    table_row_of,
    tiles_in_sight,
)
from kernels.gpu.attention_plan import FIXED_SPLIT_KEYS, GpuAttentionPlan, max_fixed_programs
from kernels.gpu.attention_tiles import (
    ATTENTION_DEVICES,
    AttentionDevice,
    AttentionForm,
    AttentionTiles,
    invariant_tiles,
    query_tiles,
)
from kernels.gpu.kv_cache import GpuKvLayer
from kernels.gpu.variant import ModelShapes, Variant


@triton.jit(do_not_specialize=["num_sequences", "has_rows", "skips_single", "table_stride"])
def _attention_kernel(
    query, out, keys, values, key_scales, value_scales, cu_seqlens, seq_lens, rows, block_table,
    num_sequences, has_rows, skips_single, query_stride, out_stride, table_stride, scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRODUCT_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr, SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # The last tiles of a sequence see most keys: they begin first.
    query_tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    sequence = find_sequence(cu_seqlens, query_tile, num_sequences, BLOCK_Q)
    first_query = tl.load(cu_seqlens + sequence).to(tl.int32)
    num_queries = tl.load(cu_seqlens + sequence + 1).to(tl.int32) - first_query
    first_token = (query_tile - first_query // BLOCK_Q - sequence) * BLOCK_Q
    if (first_token >= num_queries) | ((num_queries == 1) & (skips_single != 0)):
        return
    table_row = table_row_of(sequence, rows, has_rows)
    seq_len = tl.load(seq_lens + table_row).to(tl.int32)
    table = block_table + table_row * table_stride

    row = tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    is_row = (row < BLOCK_Q * GROUP) & (token < num_queries)
    dims = tl.arange(0, PADDED_DIM)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    token_place = (first_query + token).to(tl.int64)[:, None]
    queries = tl.load(query + token_place * query_stride + places, mask=mask, other=0.0)
    queries = queries.to(PRODUCT_TYPE)
    position = seq_len - num_queries + token
    first_position = seq_len - num_queries + first_token
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    first_tile, last_tile = tiles_in_sight(first_position, last_position, TILE, WINDOW)

    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    if SPLIT_TILES > 0:
        _, total, summed = attend_in_splits(
            queries, position, first_position, last_position, keys, values, key_scales,
            value_scales, table, seq_len, scale, first_tile, last_tile, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, VALUE_TYPE, SPLIT_TILES,
        )  # fmt: skip
    else:
        _, total, summed = attend(
            queries, position, first_position, last_position, keys, values, key_scales,
            value_scales, table, seq_len, scale, first_tile, last_tile, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, VALUE_TYPE, False,
        )  # fmt: skip
    out_places = out + token_place * out_stride + places
    tl.store(out_places, attended(total, summed).to(out.dtype.element_ty), mask=mask)


def paged_attention(
    query: Tensor,
    kv_layer: GpuKvLayer,
    plan: GpuAttentionPlan,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    out: Tensor,
    scratch: Scratch,
    batch_invariant: bool,
) -> None:
    """As `Kernels.paged_attention` says, into out [T, heads, dim].

    Tokens of query [T, heads, dim] and out may lie apart. With T == n each sequence has one query.
    The sequences of a batch are cu_seqlens[n] tokens; rows of `out` beyond are left as they are.
    `scratch` gives memory for partial results, in each step as much, whatever is in the batch.
    """
    call = AttentionCall(query, kv_layer, plan, scale, sliding_window, soft_cap, out)
    num_tokens, num_sequences = query.shape[0], plan.num_sequences
    partials = split_attention.allocate_partials(call, scratch, batch_invariant)
    if num_tokens == 0:
        return
    in_turn = batch_invariant and (
        num_sequences * call.form.num_kv_heads > max_fixed_programs(plan.device)
    )
    is_split = not in_turn and (num_sequences > 1 or num_tokens == 1)
    if is_split:
        split_attention.attend_single(call, partials, batch_invariant)
    if in_turn or num_tokens != num_sequences:
        _launch(call, batch_invariant, skips_single=is_split)


def _launch(call: AttentionCall, batch_invariant: bool, skips_single: bool) -> None:
    plan, form = call.plan, call.form
    tiles = _tiles(form, plan.device, batch_invariant)
    num_tiles = call.query.shape[0] // (tiles.rows // form.group) + plan.num_sequences
    _attention_kernel[(num_tiles * form.num_kv_heads,)](
        call.query,
        call.out,
        *call.cache_arguments(),
        *call.layout_arguments(),
        plan.num_sequences,
        int(plan.rows is not None),
        int(skips_single),
        *call.strides_and_scale(),
        **_constexprs(form, tiles, batch_invariant),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _tiles(form: AttentionForm, device: AttentionDevice, batch_invariant: bool) -> AttentionTiles:
    return (invariant_tiles if batch_invariant else query_tiles)(form, device)


def _constexprs(
    form: AttentionForm, tiles: AttentionTiles, batch_invariant: bool
) -> dict[str, object]:
    split_tiles = FIXED_SPLIT_KEYS // tiles.keys if batch_invariant else 0
    return form_constexprs(form, tiles) | {"SPLIT_TILES": split_tiles}


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """All that attention is launched as for a model of these shapes."""
    form = AttentionForm(
        *(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, shapes.block_size),
        *(shapes.dtype, shapes.kv_format, shapes.sliding_window),
    )
    yield from merged_attention.merge_variants(form)
    for name, device in ATTENTION_DEVICES.items():
        for batch_invariant in (False, True):
            tiles = _tiles(form, device, batch_invariant)
            yield form_variant(
                _attention_kernel,
                "attention" + ", batch-invariant" * batch_invariant,
                form,
                tiles,
                name,
                ("num_sequences", "has_rows", "skips_single"),
                _constexprs(form, tiles, batch_invariant),
            )
            yield from split_attention.split_variants(form, device, name, batch_invariant)
