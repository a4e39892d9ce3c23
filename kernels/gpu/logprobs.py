"""Log-softmax of logits at chosen tokens and at the likeliest, in two readings, by three kernels.

1. sum: of each segment of a row the largest logit, and the sum of exponentials.
2. rank: of each segment the likeliest tokens.
3. list: those of the row, and the log-probability of the chosen token.

A row's result does not depend on other rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.philox import natural_log
from kernels.gpu.result_buffers import Scratch
from kernels.gpu.sampling_draw import is_number
from kernels.gpu.sampling_threshold import float_of, key_of
from kernels.gpu.variant import ModelShapes, Variant

_SEGMENT = 8192
_NUM_WARPS = 8
# Room for the segments of any known vocabulary, and for so many of the likeliest tokens of each, so
# that a few forms serve all models.
_SEGMENTS = 64
_USUAL_TOP = (1, 8, 32)
# A rank is (key of the log-probability, then of two equal ones the smaller id).
_LOWEST_RANK = tl.constexpr(-(2**63))
_HIGHEST_RANK = tl.constexpr(2**63 - 1)
# exp(logit - largest) is summed in units of 2^-44: in any order to the same bits.
_UNITS = tl.constexpr(float(2**44))

_TYPES = {
    "logits": "*fp32",
    **dict.fromkeys(("row_stride", "vocab_size", "num_segments", "num_top"), "i32"),
    "chosen": "*i64",
    "maxima": "*fp32",
    "sums": "*i64",
    "ranks": "*i64",
    "chosen_out": "*fp32",
    "top_ids": "*i64",
    "top_out": "*fp32",
}


@triton.jit
def sum_kernel(logits, row_stride, vocab_size, maxima, sums, SEGMENT: tl.constexpr):
    """Of a segment; programs [n, segments]. The largest is inf where there is a NaN."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = segment * SEGMENT + tl.arange(0, SEGMENT)
    values = tl.load(
        logits + row * row_stride + places, mask=places < vocab_size, other=float("-inf")
    )
    values = tl.where(values == values, values, float("inf"))
    largest = tl.max(values, 0)
    origin = tl.where(is_number(largest), largest, 0.0)
    exponentials = tl.exp(tl.where(is_number(values), values - origin, float("-inf")))
    total = tl.sum((exponentials.to(tl.float64) * _UNITS).to(tl.int64), 0)
    part = row * tl.num_programs(1) + segment
    tl.store(maxima + part, largest)
    tl.store(sums + part, total)


@triton.jit
def _log_of_sum(maxima, sums, row, num_segments, SEGMENTS: tl.constexpr):
    """The largest logit of a row, and the logarithm of the sum of all exponentials, float64."""
    segments = tl.arange(0, SEGMENTS)
    is_part = segments < num_segments
    parts = row * num_segments + segments
    all_maxima = tl.load(maxima + parts, mask=is_part, other=float("-inf"))
    all_sums = tl.load(sums + parts, mask=is_part, other=0)
    largest = tl.max(all_maxima, 0)
    origin = tl.where(is_number(largest), largest, 0.0)
    distances = tl.where(is_number(all_maxima), all_maxima - origin, float("-inf"))
    scales = tl.exp(distances.to(tl.float64))
    total = tl.sum(all_sums.to(tl.float64) / _UNITS * scales, 0)
    total = tl.where(is_number(largest), total, 1.0)
    return largest, origin.to(tl.float64) + natural_log(total)


@triton.jit(do_not_specialize=["num_segments", "num_top"])
def rank_kernel(
    logits,
    row_stride,
    vocab_size,
    maxima,
    sums,
    ranks,
    num_segments,
    num_top,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """The ranks of a segment's likeliest tokens, [n, segments, num_top]; programs [n, segments]."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, log_of_sum = _log_of_sum(maxima, sums, row, num_segments, SEGMENTS)
    if is_number(largest):
        places = segment * SEGMENT + tl.arange(0, SEGMENT)
        is_token = places < vocab_size
        values = tl.load(logits + row * row_stride + places, mask=is_token, other=float("-inf"))
        logprobs = (values.to(tl.float64) - log_of_sum).to(tl.float32)
        own = (key_of(logprobs).to(tl.int64) << 32) - places.to(tl.int64)
        own = tl.where(is_token, own, _LOWEST_RANK)
        rank = tl.full((), _HIGHEST_RANK, tl.int64)
        target = ranks + (row * num_segments + segment) * num_top
        for i in range(num_top):
            rank = tl.max(tl.where(own < rank, own, _LOWEST_RANK), 0)
            tl.store(target + i, rank)


@triton.jit(do_not_specialize=["num_segments", "num_top"])
def list_kernel(
    logits,
    row_stride,
    vocab_size,
    chosen,
    maxima,
    sums,
    ranks,
    chosen_out,
    top_ids,
    top_out,
    num_segments,
    num_top,
    SEGMENTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """The results of a row; programs [n]."""
    row = tl.program_id(0).to(tl.int64)
    largest, log_of_sum = _log_of_sum(maxima, sums, row, num_segments, SEGMENTS)
    token_id = tl.load(chosen + row)
    is_token = (token_id >= 0) & (token_id < vocab_size)
    logit = tl.load(logits + row * row_stride + token_id, mask=is_token, other=float("nan"))
    if is_number(largest):
        tl.store(chosen_out + row, (logit.to(tl.float64) - log_of_sum).to(tl.float32))
        lanes = tl.arange(0, RANKS)
        is_rank = lanes < num_segments * num_top
        own = tl.load(ranks + row * num_segments * num_top + lanes, mask=is_rank, other=0)
        own = tl.where(is_rank, own, _LOWEST_RANK)
        rank = tl.full((), _HIGHEST_RANK, tl.int64)
        for i in range(num_top):
            rank = tl.max(tl.where(own < rank, own, _LOWEST_RANK), 0)
            top_id = -rank & 0xFFFFFFFF
            tl.store(top_ids + row * num_top + i, top_id)
            tl.store(top_out + row * num_top + i, float_of(((rank + top_id) >> 32).to(tl.int32)))
    else:
        tl.store(chosen_out + row, float("nan"))
        for i in range(num_top):
            tl.store(top_ids + row * num_top + i, i)
            tl.store(top_out + row * num_top + i, float("nan"))


def token_logprobs(
    logits: Tensor,
    chosen: Tensor,
    chosen_out: Tensor,
    top_ids: Tensor,
    top_out: Tensor,
    scratch: Scratch,
    segment: int = _SEGMENT,
) -> None:
    """`Kernels.token_logprobs` into chosen_out [n], top_ids and top_out [n, num_top].

    A row without probabilities gives NaN and the first ids; a chosen id out of range gives NaN.
    """
    (rows, vocab_size), num_top = logits.shape, top_ids.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_top <= vocab_size
    assert top_ids.is_contiguous() and top_out.is_contiguous() and chosen.dtype == torch.int64
    if rows == 0:
        return
    num_segments = triton.cdiv(vocab_size, segment)
    shape = (rows, num_segments)
    arguments = {
        "logits": logits,
        "row_stride": logits.stride(0),
        "vocab_size": vocab_size,
        "chosen": chosen,
        "maxima": scratch("logprob_maxima", shape, torch.float32),
        "sums": scratch("logprob_sums", shape, torch.int64),
        "ranks": scratch("logprob_ranks", (*shape, num_top), torch.int64),
        "chosen_out": chosen_out,
        "top_ids": top_ids,
        "top_out": top_out,
        "num_segments": num_segments,
        "num_top": num_top,
    }
    _launch(sum_kernel, shape, arguments, segment)
    if num_top:
        _launch(rank_kernel, shape, arguments, segment)
    _launch(list_kernel, (rows,), arguments, segment)


def _launch(
    kernel: triton.JITFunction, grid: tuple[int, ...], arguments: Mapping[str, Any], segment: int
) -> None:
    constexprs = _constexprs(kernel, arguments["vocab_size"], arguments["num_top"], segment)
    values = {**arguments, **constexprs}
    kernel[grid](**{name: values[name] for name in kernel.arg_names}, num_warps=_NUM_WARPS)


def _constexprs(
    kernel: triton.JITFunction, vocab_size: int, num_top: int, segment: int
) -> dict[str, int]:
    num_segments = triton.next_power_of_2(triton.cdiv(vocab_size, segment))
    segments = max(_SEGMENTS, num_segments)
    room = next((room for room in _USUAL_TOP if room >= num_top), num_top)
    values = {
        "SEGMENT": segment,
        "SEGMENTS": segments,
        "RANKS": segments * triton.next_power_of_2(room),
    }
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches for usual numbers of the likeliest tokens."""
    vocab_size = shapes.vocab_size
    is_even = vocab_size % 16 == 0
    forms = [(sum_kernel, 0), (rank_kernel, 1), *((list_kernel, num) for num in _USUAL_TOP)]
    for kernel, num_top in forms:
        constexprs = _constexprs(kernel, vocab_size, num_top, _SEGMENT)
        name = kernel.__name__.removesuffix("_kernel")
        room = f" of {num_top}" if kernel is list_kernel else ""
        yield Variant(
            kernel=kernel,
            label=f"token_logprobs: {name}{room}, rows {'' if is_even else 'not '}aligned",
            signature={arg: _TYPES[arg] for arg in kernel.arg_names if arg not in constexprs},
            constexprs=constexprs,
            num_warps=_NUM_WARPS,
            divisible_by_16=("row_stride", "vocab_size") if is_even else (),
        )
