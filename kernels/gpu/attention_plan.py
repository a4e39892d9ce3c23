"""The layout of a batch for attention, and the choice of splits that follows from shapes alone.

Nothing here reads what is on the device: lengths stay there. Into how many parts the keys of a
decoding sequence are split depends on how many sequences there are, and how long one could be.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

from kernels.gpu.attention_tiles import AttentionDevice, attention_device

# Programs that read the cache with what is in flight at a multiprocessor: enough to fill it.
_PROGRAMS_PER_MULTIPROCESSOR = 3
# One round of programs, if a sequence is then read by many; else so many rounds, that the last,
# which is not full, counts little, and that one long sequence does not keep all waiting.
_MANY_SPLITS = 8
_ROUNDS = 4
_MAX_SPLITS = 128
# Less is read sooner than it is merged.
MIN_SPLIT_KEYS = 256
# In batch-invariant mode a split ends at each multiple of this position.
FIXED_SPLIT_KEYS = 512


@dataclass(frozen=True, slots=True)
class GpuAttentionPlan:
    """The tensors that `plan_attention` was given, where they are."""

    cu_seqlens: Tensor
    seq_lens: Tensor
    block_table: Tensor
    rows: Tensor | None
    block_size: int
    device: AttentionDevice

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def longest(self) -> int:
        """No sequence has more tokens."""
        return self.block_table.shape[1] * self.block_size


def plan_attention(
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    rows: Tensor | None = None,
) -> GpuAttentionPlan:
    """As `Kernels.plan_attention` says, but a sequence of no tokens is one too: its queries get 0.

    cu_seqlens [n + 1], seq_lens, block_table and rows int32 or int64. They are read when the
    attention runs, so that a graph's replay finds what was written there since.
    """
    assert block_table.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (cu_seqlens, seq_lens))
    assert rows is None or rows.is_contiguous()
    device = attention_device(cu_seqlens.device)
    return GpuAttentionPlan(cu_seqlens, seq_lens, block_table, rows, block_size, device)


def choose_num_splits(
    num_sequences: int, num_kv_heads: int, longest: int, device: AttentionDevice
) -> int:
    """Into how many parts, at most, the keys of a sequence of one query are split."""
    programs = num_sequences * num_kv_heads
    room = device.num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
    num_splits = room // programs
    if num_splits < _MANY_SPLITS:
        num_splits = triton.cdiv(room * _ROUNDS, programs)
    return max(1, min(num_splits, _MAX_SPLITS, longest // MIN_SPLIT_KEYS))


def max_partials(device: AttentionDevice) -> int:
    """No choice of splits leaves more partial results of a KV head's query heads than this."""
    # With k programs they are cdiv(room, k) each; no sequence is split from k = room on.
    return 2 * device.num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR * _ROUNDS


def num_fixed_splits(longest: int) -> int:
    """Of a sequence of so many keys in batch-invariant mode."""
    return triton.cdiv(longest, FIXED_SPLIT_KEYS)


def max_fixed_programs(device: AttentionDevice) -> int:
    """Sequences times KV heads up to which splits are computed side by side; else in turn.

    The result is the same; of more programs than this each may as well read a whole sequence.
    """
    return device.num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // 2


def fixed_programs(
    num_sequences: int, num_kv_heads: int, longest: int, device: AttentionDevice
) -> int:
    """Programs per sequence and KV head that take turns at its splits."""
    room = device.num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR * _ROUNDS
    return min(num_fixed_splits(longest), triton.cdiv(room, num_sequences * num_kv_heads))
