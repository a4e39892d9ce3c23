"""What attention's kernels are compiled for: a model's form, and tiles that suit the device.

Tiles are as large as registers and shared memory allow without spilling, as compiled by Triton 3.9.
A program's tile of keys and one of values lie in shared memory num_stages - 1 times, the next on
their way while one is computed with.
"""

from dataclasses import dataclass

import torch
import triton

from kernels.gpu.kv_cache import KvFormat

_KIB = 1024


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

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        names = [f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}", dtype]
        if self.kv_format != dtype:
            names.append(f"KV {self.kv_format}")
        if self.sliding_window:
            names.append(f"window {self.sliding_window}")
        return ", ".join(names)

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_wide(self) -> bool:
        """Whether a head takes twice the registers of most models'."""
        return self.head_dim > 128

    @property
    def product_dtype(self) -> torch.dtype:
        """What queries and keys are multiplied as.

        Eight bits are exact in all types. A query in the 16 bits of the keys is as near as they.
        """
        if self.kv_format.has_scales or self.dtype == torch.float32:
            return self.dtype
        return self.kv_format.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        """What weights and values are multiplied as.

        A weight times a scale may be too small for float16.
        """
        dtype = self.product_dtype
        return torch.bfloat16 if self.kv_format.has_scales and dtype == torch.float16 else dtype


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """How a program works: on `rows` rows of queries, and `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def attention_device(device: torch.device) -> AttentionDevice:
    """Of the device; the CPU, where kernels are interpreted, is taken for an H100."""
    if device.type == "cpu":
        return _REHEARSED
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return AttentionDevice(shared_bytes, properties.multi_processor_count)


def query_tiles(form: AttentionForm, device: AttentionDevice) -> AttentionTiles:
    """For sequences of several queries: rows enough that matrix units wait for no keys."""
    if form.product_dtype == torch.float32:
        return _float32_tiles(form, device)
    if _is_small(device):
        return _tiles(form, 64, 32, 4, 1)
    if _is_medium(device):
        rows = 64 if form.is_wide or form.kv_format.has_scales else 128
        return _tiles(form, rows, 32, 8, 3)
    return _tiles(form, 128, 32 if form.is_wide else 64, 8, 3)


def decode_tiles(form: AttentionForm, device: AttentionDevice) -> AttentionTiles:
    """For sequences of one query: as few rows as matrix units multiply, much in flight."""
    if form.product_dtype == torch.float32:
        return _float32_tiles(form, device)
    if _is_small(device):
        return _tiles(form, 16, 32, 4, 1)
    if form.kv_format.has_scales or _is_medium(device):
        return _tiles(form, 16, 16 if form.is_wide else 32, 4, 4)
    return _tiles(form, 16, 32 if form.is_wide else 64, 4, 3)


def invariant_tiles(form: AttentionForm, device: AttentionDevice) -> AttentionTiles:
    """For all sequences in batch-invariant mode; a program holds two states."""
    if form.product_dtype == torch.float32:
        return _float32_tiles(form, device)
    if _is_small(device):
        return _tiles(form, 32, 16, 8, 1) if form.is_wide else _tiles(form, 64, 32, 8, 1)
    if _is_medium(device):
        return _tiles(form, 32, 32, 8, 3)
    return _tiles(form, 32 if form.is_wide else 64, 32, 8, 3)


def _float32_tiles(form: AttentionForm, device: AttentionDevice) -> AttentionTiles:
    """For products that matrix units do not compute exactly."""
    return _tiles(form, 16, 16, 8 if _is_medium(device) and not form.is_wide else 4, 1)


def _tiles(
    form: AttentionForm, rows: int, keys: int, num_warps: int, num_stages: int
) -> AttentionTiles:
    """With rows for the query heads of one token at least."""
    return AttentionTiles(
        max(rows, triton.next_power_of_2(form.group)), keys, num_warps, num_stages
    )


def _is_small(device: AttentionDevice) -> bool:
    return device.shared_bytes < ATTENTION_DEVICES["sm_80"].shared_bytes


def _is_medium(device: AttentionDevice) -> bool:
    return device.shared_bytes < ATTENTION_DEVICES["sm_90"].shared_bytes
