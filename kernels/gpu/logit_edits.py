"""What changes logits before a token is chosen, in place: masks, biases, penalties.

Only what changes is read and written: of a masked row the tokens that become impossible, else
single tokens. A row -1 stands for none, so that a graph can hold room for more rows than a step
has.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.result_buffers import Scratch
from kernels.gpu.variant import ModelShapes, Variant

_MASK_TILE = 4096
_BIAS_TILE = 256
# Tokens of a sequence that a program looks at at once, and programs of a sequence.
_TOKEN_TILE = 1024
_TOKEN_PROGRAMS = 8
_NUM_WARPS = 4
_TYPES = {
    **dict.fromkeys(("logits", "biases", "repetitions", "presences", "frequencies"), "*fp32"),
    **dict.fromkeys(("rows", "prompt_lens", "seq_lens"), "*i64"),
    **dict.fromkeys(("allowed", "token_ids", "counts"), "*i32"),
    **dict.fromkeys(("row_stride", "vocab_size", "allowed_stride", "token_stride"), "i32"),
    "num_biases": "i32",
}


@triton.jit(do_not_specialize=["allowed_stride"])
def mask_kernel(logits, row_stride, vocab_size, rows, allowed, allowed_stride, TILE: tl.constexpr):
    """Programs [m, tiles of the vocabulary]."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    if row >= 0:
        places = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_token = places < vocab_size
        words = tl.load(allowed + entry * allowed_stride + (places >> 5), mask=is_token, other=-1)
        is_banned = ((words >> (places & 31)) & 1) == 0
        targets = logits + row * row_stride + places
        # Added, so that NaN stays NaN.
        values = tl.load(targets, mask=is_banned, other=0.0)
        tl.store(targets, values + float("-inf"), mask=is_banned)


@triton.jit(do_not_specialize=["num_biases"])
def bias_kernel(logits, row_stride, rows, token_ids, biases, num_biases, TILE: tl.constexpr):
    """Programs [tiles of the biases]."""
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_entry = entries < num_biases
    row = tl.load(rows + entries, mask=is_entry, other=-1).to(tl.int64)
    token_id = tl.load(token_ids + entries, mask=is_entry, other=0).to(tl.int64)
    bias = tl.load(biases + entries, mask=is_entry, other=0.0)
    # Atomic, since a place may come twice; if so, one of its biases is -inf, and so is any sum.
    tl.atomic_add(logits + row * row_stride + token_id, bias, mask=row >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["token_stride"])
def clear_counts_kernel(
    rows, token_ids, token_stride, seq_lens, counts, vocab_size, TILE: tl.constexpr
):
    """Sets to 0 the counts of all tokens of a sequence; programs [m, parts of a sequence].

    Which are counts[i], int32 [vocab_size], of arbitrary contents elsewhere.
    """
    entry, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(rows + entry) >= 0:
        seq_len = tl.load(seq_lens + entry).to(tl.int32)
        for start in range(part * TILE, seq_len, tl.num_programs(1) * TILE):
            places = start + tl.arange(0, TILE)
            ids = tl.load(
                token_ids + entry * token_stride + places, mask=places < seq_len, other=-1
            )
            is_known = (ids >= 0) & (ids < vocab_size)
            tl.store(counts + entry * vocab_size + ids, 0, mask=is_known)


@triton.jit(do_not_specialize=["token_stride"])
def count_kernel(
    rows, token_ids, token_stride, prompt_lens, seq_lens, counts, vocab_size, TILE: tl.constexpr
):
    """A token of the prompt counts 1 once, each of the output 2; programs as above."""
    entry, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(rows + entry) >= 0:
        seq_len = tl.load(seq_lens + entry).to(tl.int32)
        prompt_len = tl.load(prompt_lens + entry).to(tl.int32)
        for start in range(part * TILE, seq_len, tl.num_programs(1) * TILE):
            places = start + tl.arange(0, TILE)
            ids = tl.load(
                token_ids + entry * token_stride + places, mask=places < seq_len, other=-1
            )
            is_known = (ids >= 0) & (ids < vocab_size)
            targets = counts + entry * vocab_size + ids
            in_prompt = places < prompt_len
            tl.atomic_or(targets, 1, mask=is_known & in_prompt, sem="relaxed")
            tl.atomic_add(targets, 2, mask=is_known & (places >= prompt_len), sem="relaxed")


@triton.jit(do_not_specialize=["token_stride"])
def penalize_kernel(
    logits,
    row_stride,
    rows,
    token_ids,
    token_stride,
    seq_lens,
    counts,
    vocab_size,
    repetitions,
    presences,
    frequencies,
    TILE: tl.constexpr,
):
    """Penalises each counted token once: who finds its count sets it to 0; programs as above."""
    entry, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + entry)
    if row >= 0:
        seq_len = tl.load(seq_lens + entry).to(tl.int32)
        repetition, presence = tl.load(repetitions + entry), tl.load(presences + entry)
        frequency = tl.load(frequencies + entry)
        for start in range(part * TILE, seq_len, tl.num_programs(1) * TILE):
            places = start + tl.arange(0, TILE)
            ids = tl.load(
                token_ids + entry * token_stride + places, mask=places < seq_len, other=-1
            )
            is_known = (ids >= 0) & (ids < vocab_size)
            found = tl.atomic_xchg(
                counts + entry * vocab_size + ids, 0, mask=is_known, sem="relaxed"
            )
            is_mine = is_known & (found != 0)
            targets = logits + row * row_stride + ids
            logit = tl.load(targets, mask=is_mine, other=0.0)
            repeated = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
            num_outputs = tl.where(is_mine, found >> 1, 0).to(tl.float32)
            loss = tl.where(num_outputs > 0.0, presence, 0.0) + num_outputs * frequency
            tl.store(targets, repeated - loss, mask=is_mine)


def mask_logits(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """`Kernels.mask_logits`; logits may be rows of a wider buffer."""
    vocab_size = logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == allowed.stride(1) == 1
    if len(rows) == 0:
        return
    mask_kernel[(len(rows), triton.cdiv(vocab_size, _MASK_TILE))](
        logits,
        logits.stride(0),
        vocab_size,
        rows,
        allowed,
        allowed.stride(0),
        TILE=_MASK_TILE,
        num_warps=_NUM_WARPS,
    )


def bias_logits(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
    """`Kernels.bias_logits`; logits may be rows of a wider buffer."""
    assert logits.dtype == biases.dtype == torch.float32 and logits.stride(1) == 1
    if len(rows) == 0:
        return
    bias_kernel[(triton.cdiv(len(rows), _BIAS_TILE),)](
        logits,
        logits.stride(0),
        rows,
        token_ids,
        biases,
        len(rows),
        TILE=_BIAS_TILE,
        num_warps=_NUM_WARPS,
    )


def penalize(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    seq_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    scratch: Scratch,
) -> None:
    """`Kernels.penalize`; logits may be rows of a wider buffer.

    What takes time is the lengths of the sequences, not the vocabulary.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert token_ids.dtype == torch.int32 and token_ids.stride(1) == 1
    if num_rows == 0:
        return
    arguments = {
        "logits": logits,
        "row_stride": logits.stride(0),
        "rows": rows,
        "token_ids": token_ids,
        "token_stride": token_ids.stride(0),
        "prompt_lens": prompt_lens,
        "seq_lens": seq_lens,
        "counts": scratch("penalty_counts", (num_rows, vocab_size), torch.int32),
        "vocab_size": vocab_size,
        "repetitions": repetition,
        "presences": presence,
        "frequencies": frequency,
        "TILE": _TOKEN_TILE,
    }
    for kernel in (clear_counts_kernel, count_kernel, penalize_kernel):
        kernel[(num_rows, _TOKEN_PROGRAMS)](
            **{name: arguments[name] for name in kernel.arg_names}, num_warps=_NUM_WARPS
        )


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches."""
    is_even = shapes.vocab_size % 16 == 0
    forms = {
        mask_kernel: ("mask_logits", _MASK_TILE),
        bias_kernel: ("bias_logits", _BIAS_TILE),
        clear_counts_kernel: ("penalize: clear", _TOKEN_TILE),
        count_kernel: ("penalize: count", _TOKEN_TILE),
        penalize_kernel: ("penalize", _TOKEN_TILE),
    }
    for kernel, (label, tile) in forms.items():
        names = [name for name in kernel.arg_names if name != "TILE"]
        types = {**_TYPES, "token_ids": "*i64"} if kernel is bias_kernel else _TYPES
        yield Variant(
            kernel=kernel,
            label=f"{label}, rows {'' if is_even else 'not '}aligned",
            signature={name: types[name] for name in names},
            constexprs={"TILE": tile},
            num_warps=_NUM_WARPS,
            divisible_by_16=tuple(
                name for name in names if is_even and name in ("row_stride", "vocab_size")
            ),
        )
