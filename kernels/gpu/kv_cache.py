"""The paged KV cache on the device: what keys and values are held in, and one layer's memory.

An element of fp8 (e4m3) or int8 is its value divided by a scale that the `head_dim` elements of one
token and KV head share: amax / 448 or amax / 127, the largest that their formats hold (Micikevicius
et al., 2022), so that the largest element is exact but for rounding. A head of zeros has scale 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

FP8_LARGEST = 448.0  # of e4m3 without infinities
INT8_LARGEST = 127.0
SCALE_BYTES = 4


class KvFormat(StrEnum):
    """What an element of the cache is."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def stored_dtype(self) -> torch.dtype:
        """As kernels write it: fp8 as its bits, which every device can write."""
        return torch.uint8 if self is KvFormat.FP8 else self.dtype

    @property
    def has_scales(self) -> bool:
        return self in (KvFormat.FP8, KvFormat.INT8)

    @property
    def largest(self) -> float:
        """The magnitude that a head's largest element is scaled to; 0 where there are no scales."""
        return {KvFormat.FP8: FP8_LARGEST, KvFormat.INT8: INT8_LARGEST}.get(self, 0.0)

    def head_bytes(self, head_dim: int) -> int:
        """Memory of one token's key, or value, of one KV head."""
        return head_dim * self.dtype.itemsize + SCALE_BYTES * self.has_scales


_DTYPES = {
    KvFormat.BFLOAT16: torch.bfloat16,
    KvFormat.FLOAT16: torch.float16,
    KvFormat.FLOAT32: torch.float32,
    KvFormat.FP8: torch.float8_e4m3fn,
    KvFormat.INT8: torch.int8,
}


@dataclass(frozen=True, slots=True)
class GpuKvLayer:
    """One layer's keys and values.

    data [2, num_blocks, block_size, kv_heads, head_dim], contiguous: keys, then values. scales
    float32 [2, num_blocks, block_size, kv_heads], or None where `format` has none.
    """

    data: Tensor
    scales: Tensor | None
    format: KvFormat

    @property
    def num_blocks(self) -> int:
        return self.data.shape[1]

    @property
    def block_size(self) -> int:
        return self.data.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[3]

    @property
    def head_dim(self) -> int:
        return self.data.shape[4]

    def stored(self) -> Tensor:
        """`data` with elements of `format.stored_dtype`."""
        return self.data.view(self.format.stored_dtype)


class GpuKvCache:
    """All layers, in one piece of memory, or two where there are scales."""

    def __init__(
        self,
        kv_format: KvFormat,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        heads = (num_layers, 2, num_blocks, block_size, num_kv_heads)
        self.format = kv_format
        self.data = torch.empty(*heads, head_dim, dtype=kv_format.dtype, device=device)
        self.scales = torch.empty(heads, device=device) if kv_format.has_scales else None

    def __len__(self) -> int:
        return self.data.shape[0]

    def __getitem__(self, layer: int) -> GpuKvLayer:
        scales = None if self.scales is None else self.scales[layer]
        return GpuKvLayer(self.data[layer], scales, self.format)

    def __iter__(self) -> Iterator[GpuKvLayer]:
        return (self[layer] for layer in range(len(self)))


def kv_block_bytes(
    kv_format: KvFormat, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
) -> int:
    """Memory that one block of all layers takes."""
    return 2 * num_layers * block_size * num_kv_heads * kv_format.head_bytes(head_dim)
