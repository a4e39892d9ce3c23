"""The GPU backend: every op of `Kernels` on the device, by Triton's kernels and cuBLAS."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.config import KernelConfig
from kernels.gpu import (
    activations,
    attention,
    attention_plan,
    gathers,
    linear,
    logit_edits,
    logprobs,
    norms,
    rope,
    sampling,
)
from kernels.gpu.kv_cache import GpuKvCache, GpuKvLayer, KvFormat, kv_block_bytes
from kernels.gpu.result_buffers import ResultBuffers
from kernels.ops import (
    AttentionPlan,
    Kernels,
    KvCache,
    PackedEmbedding,
    PackedLinear,
    StoredKind,
    StoredMatrix,
)


class GpuKernels(Kernels):
    """Activations are bfloat16, or float32 where the weights are.

    No op waits for the device, allocates once the largest step has run, or has shapes that depend
    on data, so that a step can be captured as a CUDA graph. Results lie in `buffers`. On the CPU
    all of it runs in Triton's interpreter. One instance serves one thread and one stream.
    """

    uses_torch_threads = True

    def __init__(self, device: torch.device, config: KernelConfig) -> None:
        self.device = device
        self.dtype = linear.activation_dtype(config)
        self.buffers = ResultBuffers(device)
        self.batch_invariant = config.batch_invariant
        self.stored_kinds = linear.stored_kinds(config)
        wanted = config.kv if config.kv != "auto" else str(self.dtype).removeprefix("torch.")
        self.kv_format = KvFormat(wanted)
        self._config = config
        # Else cuBLAS may round the sums of parts of the columns to bfloat16 before it adds them.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.description = (
            f"Triton kernels on {_device_name(device)}, weights: {config.weights}, "
            f"KV: {self.kv_format}{', batch-invariant' if config.batch_invariant else ''}"
        )

    def keep_addresses(self) -> None:
        self.buffers.keep_addresses()

    def pack_linear(
        self, parts: Sequence[Tensor | StoredMatrix], bias: Tensor | None = None
    ) -> PackedLinear:
        return linear.pack_linear(parts, bias, self._config, self.device)

    def packed_bytes(self, kind: StoredKind, rows: int, columns: int) -> int:
        return linear.packed_bytes(kind, rows, columns)

    def pack_embedding(self, part: Tensor | StoredMatrix) -> PackedEmbedding:
        return linear.pack_embedding(part, self._config, self.device)

    def tied_head(self, embedding: PackedEmbedding) -> PackedLinear:
        return linear.tied_head(embedding, self._config)

    def kv_block_bytes(
        self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> int:
        return kv_block_bytes(self.kv_format, num_layers, block_size, num_kv_heads, head_dim)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KvCache:
        return GpuKvCache(
            self.kv_format, num_layers, num_blocks, block_size, num_kv_heads, head_dim, self.device
        )

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        out = self.buffers.take("linear", len(x), packed.out_features, x.dtype)
        packed(x, out, self.buffers.scratch)
        return out

    def logits(self, x: Tensor, head: PackedLinear) -> Tensor:
        out = self.buffers.take("logits", len(x), head.out_features, torch.float32)
        if head.gives_float32:
            head(x, out, self.buffers.scratch)
            return out
        return out.copy_(self.linear(x, head))

    def embedding(self, ids: Tensor, table: PackedEmbedding) -> Tensor:
        out = self.buffers.take("embedding", len(ids), table.width, self.dtype)
        table(ids, out)
        return out

    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        out = self.buffers.take("take_rows", len(indices), x.shape[1], x.dtype)
        gathers.take_rows(x, indices, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self.buffers.take("rms_norm", *x.shape, x.dtype)
        norms.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self.buffers.take("rms_norm", *x.shape, x.dtype)
        norms.add_rms_norm(x, residual, weight, eps, out)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = self.buffers.take("silu_and_mul", rows, width // 2, gate_up.dtype)
        activations.silu_and_mul(gate_up, out)
        return out

    def rope_and_cache(
        self,
        query: Tensor,
        query_positions: Tensor,
        key: Tensor,
        value: Tensor,
        key_positions: Tensor,
        cos_sin_table: Tensor,
        kv_layer: GpuKvLayer,
        slot_mapping: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        out = self._heads("rope_and_cache", query)
        rope.rope_and_cache(
            *(query, query_positions, key, value, key_positions, cos_sin_table),
            *(kv_layer, slot_mapping, query_norm, key_norm, eps, out),
        )
        return out

    def plan_attention(
        self,
        cu_seqlens: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        rows: Tensor | None = None,
    ) -> AttentionPlan:
        return attention_plan.plan_attention(cu_seqlens, seq_lens, block_table, block_size, rows)

    def paged_attention(
        self,
        query: Tensor,
        kv_layer: GpuKvLayer,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """With soft_cap, scores become soft_cap · tanh(score / soft_cap)."""
        out = self._heads("paged_attention", query)
        attention.paged_attention(
            *(query, kv_layer, plan, scale, sliding_window, soft_cap),
            *(out, self.buffers.scratch, self.batch_invariant),
        )
        return out

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        logit_edits.mask_logits(logits, rows, allowed)

    def bias_logits(self, logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
        logit_edits.bias_logits(logits, rows, token_ids, biases)

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
        logit_edits.penalize(
            *(logits, rows, token_ids, prompt_lens, seq_lens, repetition, presence, frequency),
            self.buffers.scratch,
        )

    def largest(self, logits: Tensor) -> Tensor:
        out = self.buffers.take("largest", len(logits), 1, torch.float32)[:, 0]
        return torch.amax(logits, dim=-1, out=out)

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
        if out is None:
            out = self.buffers.take("sample", len(logits), 1, torch.int64)[:, 0]
        sampling.sample(
            *(logits, temperature, min_p, top_k, top_p, seeds, positions),
            *(out, self.buffers.scratch),
        )
        return out

    def draw_from_part(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        first_token_id: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a rank that has the tokens from first_token_id on can tell of `sample`, [n] each.

        The largest logit, infinite where one is NaN, and its first token; for rows that draw from
        all tokens the best score, float64, and its token.
        """
        parts = sampling.scan(
            *(logits, temperature, min_p, top_k, top_p, seeds, positions),
            self.buffers.scratch,
            first_token_id=first_token_id,
        )
        # Of equal segments the first.
        largest, segments = parts["maxima"].max(dim=1, keepdim=True)
        likeliest = parts["likeliest"].gather(1, segments)
        scores, segments = parts["scores"].max(dim=1, keepdim=True)
        winners = parts["winners"].gather(1, segments)
        return largest[:, 0], likeliest[:, 0], scores[:, 0], winners[:, 0]

    def token_logprobs(
        self, logits: Tensor, chosen: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = len(logits)
        chosen_out = self.buffers.take("chosen_logprobs", rows, 1, torch.float32)[:, 0]
        top_ids = self.buffers.take("top_ids", rows, num_top, torch.int64)
        top_out = self.buffers.take("top_logprobs", rows, num_top, torch.float32)
        logprobs.token_logprobs(logits, chosen, chosen_out, top_ids, top_out, self.buffers.scratch)
        return chosen_out, top_ids, top_out

    def _heads(self, op: str, query: Tensor) -> Tensor:
        tokens, heads, dim = query.shape
        return self.buffers.take(op, tokens, heads * dim, query.dtype).view(tokens, heads, dim)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU, interpreted"
