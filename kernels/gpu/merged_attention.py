"""Merges the states that split attention left of ranges of a sequence's keys, by log-sum-exp.

With M = max of m_i, out = Σ sum_i · 2^(m_i - M) / Σ total_i · 2^(m_i - M) (Dao et al., 2023): all
at once, or in batch-invariant mode in turn, as attention.py merges them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_call import AttentionCall
from kernels.gpu.attention_loop import attended, merge_states, table_row_of, tiles_in_sight
from kernels.gpu.attention_plan import FIXED_SPLIT_KEYS
from kernels.gpu.attention_tiles import AttentionForm
from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.variant import Variant

# Partial results that are on their way at once, while they are merged in turn.
_MERGED_AT_ONCE: tl.constexpr = tl.constexpr(8)
# Splits that a merging program has room for.
_MERGED_ROOMS = (8, 32, 128)
# Elements that it holds: of so many splits, a slice of the head.
_MERGED_ELEMENTS = 4096
_SMALLEST_SLICE = 32


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    out, partial_sums, partial_states, cu_seqlens, num_splits, out_stride, HEAD_DIM: tl.constexpr,
    SLICE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(2)
    token = tl.load(cu_seqlens + sequence)
    if tl.load(cu_seqlens + sequence + 1) - token != 1:
        return
    split = tl.arange(0, SPLITS)
    places = (sequence.to(tl.int64) * tl.num_programs(0) + head) * num_splits + split
    is_split = split < num_splits
    best = tl.load(partial_states + places * 2, mask=is_split, other=float("-inf"))
    total = tl.load(partial_states + places * 2 + 1, mask=is_split, other=0.0)
    dims = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    mask = is_split[:, None] & (dims < HEAD_DIM)[None, :]
    sums = partial_sums + places[:, None] * HEAD_DIM + dims[None, :]
    summed = tl.load(sums, mask=mask, other=0.0)
    all_best = tl.max(best, 0)
    decay = tl.exp2(best - tl.where(all_best == float("-inf"), 0.0, all_best))
    all_total = tl.sum(total * decay, 0)
    all_summed = tl.sum(summed * decay[:, None], 0)
    result = all_summed * (1.0 / tl.where(all_total == 0.0, 1.0, all_total))
    out_places = out + token.to(tl.int64) * out_stride + head * HEAD_DIM + dims
    tl.store(out_places, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_splits", "has_rows"])
def _merge_in_turn_kernel(
    out, partial_sums, partial_states, cu_seqlens, seq_lens, rows, num_splits, has_rows, out_stride,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(2)
    token = tl.load(cu_seqlens + sequence)
    num_queries = tl.load(cu_seqlens + sequence + 1) - token
    seq_len = tl.load(seq_lens + table_row_of(sequence, rows, has_rows)).to(tl.int32)
    if num_queries != 1:
        return
    first_split, last_split = tiles_in_sight(seq_len - 1, seq_len - 1, SPLIT_KEYS, WINDOW)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([1, PADDED_DIM], tl.float32)
    for first in range(first_split, last_split, _MERGED_AT_ONCE):
        for offset in tl.static_range(_MERGED_AT_ONCE):
            split = tl.full([1], 0, tl.int64) + first + offset
            is_split = split < last_split
            place = (sequence.to(tl.int64) * tl.num_programs(0) + head) * num_splits + split
            states = partial_states + place * 2
            sums = partial_sums + place[:, None] * HEAD_DIM + dims
            # Of a split beyond the last, the merge changes nothing.
            best, total, summed = merge_states(
                best,
                total,
                summed,
                tl.load(states, mask=is_split, other=float("-inf")),
                tl.load(states + 1, mask=is_split, other=0.0),
                tl.load(sums, mask=is_split[:, None] & (dims < HEAD_DIM), other=0.0),
            )
    places = out + token.to(tl.int64) * out_stride + head * HEAD_DIM + dims
    tl.store(places, attended(total, summed).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def merge(
    call: AttentionCall, partials: tuple[Tensor, Tensor], num_splits: int, batch_invariant: bool
) -> None:
    """Writes the rows of sequences of one query."""
    form, plan = call.form, call.plan
    cu_seqlens, seq_lens, rows, _ = call.layout_arguments()
    choice = _choose(form, num_splits, batch_invariant)
    layout = (cu_seqlens, seq_lens, rows) if batch_invariant else (cu_seqlens,)
    counts = (num_splits, int(plan.rows is not None)) if batch_invariant else (num_splits,)
    choice.kernel[(form.num_heads, choice.num_slices, plan.num_sequences)](
        call.out,
        *partials,
        *layout,
        *counts,
        call.out.stride(0),
        **choice.constexprs,
        num_warps=choice.num_warps,
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """How partial results are merged: each head in so many slices."""

    kernel: triton.JITFunction[Any]
    num_slices: int
    num_warps: int
    constexprs: dict[str, object]


def _choose(form: AttentionForm, num_splits: int, batch_invariant: bool) -> _Choice:
    padded_dim = triton.next_power_of_2(form.head_dim)
    constexprs: dict[str, object] = {"HEAD_DIM": form.head_dim}
    if batch_invariant:
        constexprs |= {"PADDED_DIM": padded_dim, "WINDOW": form.sliding_window}
        constexprs |= {"SPLIT_KEYS": FIXED_SPLIT_KEYS}
        return _Choice(_merge_in_turn_kernel, 1, 1, constexprs)
    room = next(room for room in _MERGED_ROOMS if room >= num_splits)
    width = min(padded_dim, max(_MERGED_ELEMENTS // room, _SMALLEST_SLICE))
    constexprs |= {"SLICE": width, "SPLITS": room}
    return _Choice(_merge_kernel, triton.cdiv(form.head_dim, width), 4, constexprs)


def merge_variants(form: AttentionForm) -> Iterator[Variant]:
    """For any number of splits, on any device."""
    for num_splits in (*_MERGED_ROOMS, 0):
        batch_invariant = num_splits == 0
        choice = _choose(form, num_splits, batch_invariant)
        layout = ("cu_seqlens", "seq_lens", "rows") if batch_invariant else ("cu_seqlens",)
        counts = ("num_splits", "has_rows") if batch_invariant else ("num_splits",)
        signature = {"out": pointer_type(form.dtype)}
        signature |= dict.fromkeys(("partial_sums", "partial_states"), "*fp32")
        signature |= dict.fromkeys(layout, "*i32")
        signature |= dict.fromkeys((*counts, "out_stride"), "i32")
        yield Variant(
            choice.kernel,
            f"attention merged {'in turn' if batch_invariant else f'of {num_splits}'}, {form}",
            signature,
            choice.constexprs,
            choice.num_warps,
            divisible_by_16=("out_stride",),
        )
