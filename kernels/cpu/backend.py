"""The CPU backend without a compiled library: every op of `Kernels` on torch's own CPU ops."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import attention, linear, sampling
from kernels.ops import (
    AttentionPlan,
    Kernels,
    KvCache,
    KvLayer,
    PackedEmbedding,
    PackedLinear,
    StoredMatrix,
)


class CpuKernels(Kernels):
    """Weights, activations and KV are held in `dtype`, float32 or bfloat16.

    Holds scratch buffers, so one instance serves one thread.
    """

    num_logits_copies = 8

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.description = f"torch's own CPU kernels in {str(dtype).removeprefix('torch.')}"
        self._attention = attention.PagedAttention()

    def pack_linear(
        self, parts: Sequence[Tensor | StoredMatrix], bias: Tensor | None = None
    ) -> PackedLinear:
        return linear.pack(torch.cat([part.to(self.dtype) for part in parts]), bias)

    def pack_embedding(self, part: Tensor | StoredMatrix) -> PackedEmbedding:
        return part.to(self.dtype)

    def tied_head(self, embedding: PackedEmbedding) -> PackedLinear:
        return linear.pack(embedding, None)

    def kv_block_bytes(
        self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> int:
        return 2 * num_layers * block_size * num_kv_heads * head_dim * self.dtype.itemsize

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KvCache:
        """A tensor of a layer [2 (keys, values), num_blocks, block_size, num_kv_heads, head_dim]
        each."""
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        return torch.empty(shape, dtype=self.dtype)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return packed(x)

    def embedding(self, ids: Tensor, table: PackedEmbedding) -> Tensor:
        return table.index_select(0, ids)

    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        return x.index_select(0, indices)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return F.rms_norm(residual, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        # Not F.silu: it computes what is left over of a vector by another formula, so that a row's
        # last bits would depend on how the batch is cut into vectors and threads.
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.div(gate, torch.neg(gate).exp_().add_(1)).mul_(up)

    def rope_and_cache(
        self,
        query: Tensor,
        query_positions: Tensor,
        key: Tensor,
        value: Tensor,
        key_positions: Tensor,
        cos_sin_table: Tensor,
        kv_layer: KvLayer,
        slot_mapping: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        if query_norm is not None and key_norm is not None:
            query = self.rms_norm(query, query_norm, eps)
            key = self.rms_norm(key, key_norm, eps)
        cos_sin = cos_sin_table.index_select(0, key_positions)
        slots, slot_mapping = kv_layer.flatten(1, 2), slot_mapping.long()
        slots[0].index_copy_(0, slot_mapping, _rotate(key, cos_sin))
        slots[1].index_copy_(0, slot_mapping, value)
        if query_positions is not key_positions:
            cos_sin = cos_sin_table.index_select(0, query_positions)
        return _rotate(query, cos_sin)

    def plan_attention(
        self,
        cu_seqlens: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        rows: Tensor | None = None,
    ) -> AttentionPlan:
        if rows is not None:
            seq_lens = seq_lens[rows]
            most_blocks = -(-int(seq_lens.max()) // block_size)
            block_table = block_table[:, :most_blocks][rows]
        return attention.plan(cu_seqlens, seq_lens, block_table, block_size)

    def paged_attention(
        self,
        query: Tensor,
        kv_layer: KvLayer,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int = 0,
    ) -> Tensor:
        return self._attention(query, kv_layer, plan, scale, sliding_window)

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        sampling.mask_logits(logits, rows, allowed)

    def bias_logits(self, logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
        sampling.bias_logits(logits, rows, token_ids, biases)

    def penalize(
        self,
        logits: Tensor,
        rows: Tensor,
        token_ids: Tensor,
        prompt_lens: Tensor,
        seq_lens: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        sampling.penalize(
            logits, rows, token_ids, prompt_lens, seq_lens, repetition, presence, frequency
        )

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        ids = sampling.sample(logits, temperature, min_p, top_k, top_p, seeds, positions)
        return ids if out is None else out.copy_(ids)

    def token_logprobs(
        self, logits: Tensor, chosen: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return sampling.token_logprobs(logits, chosen, num_top)


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    result_a, result_b = result.chunk(2, dim=-1)
    torch.mul(a, cos, out=result_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=result_b).addcmul_(a, sin)
    return result
