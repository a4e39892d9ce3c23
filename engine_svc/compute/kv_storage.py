"""The KV cache: its layout, what a block takes, and how many blocks memory has room for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_svc.compute.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvLayout:
    """[num_layers, 2 (keys, values), num_blocks, block_size, num_kv_heads, head_dim].

    Token `offset` of a block lies in slot block · block_size + offset of every layer.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> "KvLayout":
        return cls(config.num_layers, block_size, config.num_kv_heads, config.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        values = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> Tensor:
        """Memory that the system gives page by page as it is first written; contents arbitrary."""
        return torch.empty(
            (
                self.num_layers,
                2,
                num_blocks,
                self.block_size,
                self.num_kv_heads,
                self.head_dim,
            ),
            dtype=self.dtype,
        )
