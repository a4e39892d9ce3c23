"""Attention of sequences of one query, whose keys several programs share (Dao et al., 2023).

Each program leaves the state of a range of keys: for each query head of one KV head the best score,
the total of the weights, and the sum of values (attention_loop.py); merged_attention.py makes the
result of these. A sequence that is not split is written at once. How many tiles a range has is
settled on the device by the sequence's length, so that a short sequence keeps no program waiting.

In batch-invariant mode ranges end where position says, and programs take turns at them.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import merged_attention
from kernels.gpu.attention_call import AttentionCall, Scratch, form_constexprs, form_variant
from kernels.gpu.attention_loop import attend, attended, splits_in_sight, table_row_of
from kernels.gpu.attention_plan import (
    FIXED_SPLIT_KEYS,
    MIN_SPLIT_KEYS,
    choose_num_splits,
    fixed_programs,
    max_fixed_programs,
    max_partials,
    num_fixed_splits,
)
from kernels.gpu.attention_tiles import (
    AttentionDevice,
    AttentionForm,
    AttentionTiles,
    decode_tiles,
    invariant_tiles,
)
from kernels.gpu.variant import Variant


@triton.jit(do_not_specialize=["num_splits", "has_rows", "table_stride"])
def _split_kernel(
    query, out, partial_sums, partial_states, keys, values, key_scales, value_scales, cu_seqlens,
    seq_lens, rows, block_table, num_splits, has_rows, query_stride, out_stride, table_stride,
    scale, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRODUCT_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr, SPLIT_TILES: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    # The heads of a token lie side by side: programs that read them run at the same time.
    kv_head = tl.program_id(0)
    sequence = tl.program_id(2)
    # All that does not wait for another load is asked for before any is waited for.
    token = tl.load(cu_seqlens + sequence)
    num_queries = tl.load(cu_seqlens + sequence + 1) - token
    table_row = table_row_of(sequence, rows, has_rows)
    seq_len = tl.load(seq_lens + table_row).to(tl.int32)
    table = block_table + table_row * table_stride
    if num_queries != 1:
        return

    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    mask = (row < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row
    places = head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(query + token.to(tl.int64) * query_stride + places, mask=mask, other=0.0)
    queries = queries.to(PRODUCT_TYPE)
    position = tl.full([BLOCK_M], 0, tl.int32) + seq_len - 1
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head

    first_tile, last_tile, origin, per_split, first_split, last_split = splits_in_sight(
        seq_len, num_splits, TILE, WINDOW, SPLIT_TILES, MIN_TILES
    )
    # A sequence of no keys is computed too, for its zeros.
    last_split = tl.maximum(last_split, 1)
    for split in range(first_split + tl.program_id(1), last_split, tl.num_programs(1)):
        begin = origin + split * per_split
        best, total, summed = attend(
            queries, position, seq_len - 1, seq_len - 1, keys, values, key_scales, value_scales,
            table, seq_len, scale, tl.maximum(begin, first_tile),
            tl.minimum(begin + per_split, last_tile), NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE,
            WINDOW, SOFT_CAP, VALUE_TYPE, SPLIT_TILES > 0 and WINDOW > 0,
        )  # fmt: skip
        if num_splits == 1:
            result = attended(total, summed).to(out.dtype.element_ty)
            tl.store(out + token.to(tl.int64) * out_stride + places, result, mask=mask)
        else:
            place = (sequence.to(tl.int64) * NUM_KV_HEADS * GROUP + head) * num_splits + split
            tl.store(partial_states + place * 2, best, mask=row < GROUP)
            tl.store(partial_states + place * 2 + 1, total, mask=row < GROUP)
            sums = partial_sums + place[:, None] * HEAD_DIM + dims[None, :]
            tl.store(sums, summed, mask=mask)


def allocate_partials(
    call: AttentionCall, scratch: Scratch, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """Sums and states of partial results, of as many as any batch leaves."""
    form, device = call.form, call.plan.device
    if batch_invariant:
        num_partials = max_fixed_programs(device) * num_fixed_splits(call.plan.longest)
    else:
        num_partials = max_partials(device)
    num_partials *= form.group
    return (
        scratch("attention sums", (num_partials, form.head_dim), torch.float32),
        scratch("attention states", (num_partials, 2), torch.float32),
    )


def attend_single(
    call: AttentionCall, partials: tuple[Tensor, Tensor], batch_invariant: bool
) -> None:
    """Attention of the sequences that have one query; the others' rows stay as they are."""
    form, plan = call.form, call.plan
    num_sequences, has_rows = plan.num_sequences, int(plan.rows is not None)
    tiles = _tiles(form, plan.device, batch_invariant)
    shape = (num_sequences, form.num_kv_heads, plan.longest, plan.device)
    num_splits = num_fixed_splits(plan.longest) if batch_invariant else choose_num_splits(*shape)
    programs = fixed_programs(*shape) if batch_invariant else num_splits
    _split_kernel[(form.num_kv_heads, programs, num_sequences)](
        call.query,
        call.out,
        *partials,
        *call.cache_arguments(),
        *call.layout_arguments(),
        num_splits,
        has_rows,
        *call.strides_and_scale(),
        **_constexprs(form, tiles, batch_invariant),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_splits > 1:
        merged_attention.merge(call, partials, num_splits, batch_invariant)


def _tiles(form: AttentionForm, device: AttentionDevice, batch_invariant: bool) -> AttentionTiles:
    return (invariant_tiles if batch_invariant else decode_tiles)(form, device)


def _constexprs(
    form: AttentionForm, tiles: AttentionTiles, batch_invariant: bool
) -> dict[str, object]:
    return form_constexprs(form, tiles) | {
        "SPLIT_TILES": FIXED_SPLIT_KEYS // tiles.keys if batch_invariant else 0,
        "MIN_TILES": MIN_SPLIT_KEYS // tiles.keys,
    }


def split_variants(
    form: AttentionForm, device: AttentionDevice, device_name: str, batch_invariant: bool
) -> Iterator[Variant]:
    """What sequences of one query are computed by."""
    tiles = _tiles(form, device, batch_invariant)
    kind = ", batch-invariant" * batch_invariant
    split = form_variant(
        *(_split_kernel, "split attention" + kind, form, tiles, device_name),
        ("num_splits", "has_rows"),
        _constexprs(form, tiles, batch_invariant),
    )
    partials = {"partial_sums": "*fp32", "partial_states": "*fp32"}
    yield replace(split, signature={**split.signature, **partials})
