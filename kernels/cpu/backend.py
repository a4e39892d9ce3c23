"""The CPU backend: every op of `Kernels` on torch's own CPU ops."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import attention, linear, sampling
from kernels.ops import AttentionPlan, Kernels, PackedLinear


class CpuKernels(Kernels):
    """Holds scratch buffers, so one instance serves one thread."""

    def __init__(self) -> None:
        self._attention = attention.PagedAttention()

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return linear.pack(weight, bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return packed(x)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table.index_select(0, ids)

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
        query_cos_sin: Tensor,
        key: Tensor,
        value: Tensor,
        key_cos_sin: Tensor,
        kv_layer: Tensor,
        slot_mapping: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        if query_norm is not None and key_norm is not None:
            query = self.rms_norm(query, query_norm, eps)
            key = self.rms_norm(key, key_norm, eps)
        slots = kv_layer.flatten(1, 2)
        slots[0].index_copy_(0, slot_mapping, _rotate(key, key_cos_sin))
        slots[1].index_copy_(0, slot_mapping, value)
        return _rotate(query, query_cos_sin)

    def plan_attention(
        self, cu_seqlens: Tensor, seq_lens: Tensor, block_table: Tensor, block_size: int
    ) -> AttentionPlan:
        return attention.plan(cu_seqlens, seq_lens, block_table, block_size)

    def paged_attention(
        self,
        query: Tensor,
        kv_layer: Tensor,
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
        token_ids: Tensor,
        prompt_lens: Tensor,
        seq_lens: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        sampling.penalize(logits, token_ids, prompt_lens, seq_lens, repetition, presence, frequency)

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        return sampling.sample(logits, temperature, min_p, top_k, top_p, seeds, positions)

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
