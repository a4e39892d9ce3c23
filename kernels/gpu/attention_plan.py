"""The layout of a batch for attention, and the choices that follow from shapes alone.

Nothing here reads what is on the device: lengths stay there. What tiles a kernel works in depends
on the model and on the device's shared memory; into how many parts the keys of a decoding sequence
are split, on how many sequences there are and how long the longest could be.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.gpu.kv_cache import KvFormat

_KIB = 1024
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
class AttentionDevice:
    """What of a device the choices depend on: bytes of shared memory a program may have."""

    shared_bytes: int
    num_multiprocessors: int


# Of each device that kernels are compiled for ahead of time.
ATTENTION_DEVICES = {
    "sm_80": AttentionDevice(163 * _KIB, 108),
    "sm_90": AttentionDevice(227 * _KIB, 132),
    "gfx942": AttentionDevice(64 * _KIB, 304),
}
_REHEARSED = ATTENTION_DEVICES["sm_90"]


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


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """How a program works: on `rows` rows of queries, and `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


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


def attention_device(device: torch.device) -> AttentionDevice:
    """Of the device; the CPU, where kernels are interpreted, is taken for an H100."""
    if device.type == "cpu":
        return _REHEARSED
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return AttentionDevice(shared_bytes, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What of a model and its cache the kernels are compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of queries
    kv_format: KvFormat
    sliding_window: int = 0
    soft_cap: float = 0.0

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def product_dtype(self) -> torch.dtype:
        """What queries and keys are multiplied as: eight bits are exact in all of them."""
        if self.kv_format.has_scales:
            return self.dtype
        return torch.promote_types(self.dtype, self.kv_format.dtype)

    @property
    def value_dtype(self) -> torch.dtype:
        """What weights and values are multiplied as.

        A weight times a scale may be too small for float16.
        """
        dtype = self.product_dtype
        return torch.bfloat16 if self.kv_format.has_scales and dtype == torch.float16 else dtype


def query_tiles(form: AttentionForm, device: AttentionDevice) -> AttentionTiles:
    """For sequences of several queries."""
    least_rows = triton.next_power_of_2(form.group)
    if form.product_dtype == torch.float32:
        return AttentionTiles(max(16, least_rows), 32, 4, 1)
    is_wide = form.head_dim > 128
    if device.shared_bytes >= ATTENTION_DEVICES["sm_90"].shared_bytes:
        return AttentionTiles(max(128, least_rows), 32 if is_wide else 64, 8, 3)
    if device.shared_bytes >= ATTENTION_DEVICES["sm_80"].shared_bytes:
        return AttentionTiles(max(64 if is_wide else 128, least_rows), 32 if is_wide else 64, 8, 3)
    return AttentionTiles(max(64, least_rows), 32, 4, 1)


def decode_tiles(form: AttentionForm, device: AttentionDevice) -> AttentionTiles:
    """For sequences of one query: as few rows as matrix units multiply, much in flight."""
    rows = max(16, triton.next_power_of_2(form.group))
    if form.product_dtype == torch.float32:
        return AttentionTiles(rows, 32, 4, 1)
    is_small = device.shared_bytes < ATTENTION_DEVICES["sm_80"].shared_bytes
    is_wide = form.head_dim > 128
    return AttentionTiles(rows, 32 if is_wide or is_small else 64, 4, 1 if is_small else 3)


def invariant_tiles(form: AttentionForm, device: AttentionDevice) -> AttentionTiles:
    """For all sequences in batch-invariant mode."""
    least_rows = triton.next_power_of_2(form.group)
    if form.product_dtype == torch.float32:
        return AttentionTiles(max(16, least_rows), 32, 4, 1)
    is_small = device.shared_bytes < ATTENTION_DEVICES["sm_80"].shared_bytes
    num_warps = 8 if form.head_dim > 128 else 4
    return AttentionTiles(max(64, least_rows), 32, num_warps, 1 if is_small else 3)


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
