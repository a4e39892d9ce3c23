"""The KV cache of a model: its blocks, and what one of them takes."""

from dataclasses import dataclass

from engine_svc.compute.model.config import ModelConfig
from kernels import Kernels, KvCache


@dataclass(frozen=True, slots=True)
class KvStorage:
    """Token `offset` of a block lies in slot block · block_size + offset of every layer."""

    layers: KvCache
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls, kernels: Kernels, config: ModelConfig, num_blocks: int, block_size: int
    ) -> "KvStorage":
        """Contents are arbitrary."""
        layers = kernels.allocate_kv(
            config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim
        )
        return cls(layers, num_blocks, block_size)


def kv_block_bytes(kernels: Kernels, config: ModelConfig, block_size: int) -> int:
    """What one block takes, over all layers."""
    return kernels.kv_block_bytes(
        config.num_layers, block_size, config.num_kv_heads, config.head_dim
    )
