"""Every op in its plainest form, as its contract says it, for tests to compare backends with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.noise import gumbel_noise
from kernels.ops import (
    GREEDY_TEMPERATURE,
    AttentionPlan,
    Kernels,
    KvCache,
    KvLayer,
    PackedEmbedding,
    PackedLinear,
    StoredMatrix,
)


class ReferenceKernels(Kernels):
    """Slow on purpose: a loop over sequences, one over queries, all sums in float64.

    `dtype` is only what weights are packed and caches allocated as: ops take any.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.description = f"reference kernels in {dtype}"

    def pack_linear(
        self, parts: Sequence[Tensor | StoredMatrix], bias: Tensor | None = None
    ) -> PackedLinear:
        return torch.cat([part.to(self.dtype) for part in parts]), bias

    def pack_embedding(self, part: Tensor | StoredMatrix) -> PackedEmbedding:
        return part.to(self.dtype)

    def tied_head(self, embedding: PackedEmbedding) -> PackedLinear:
        return embedding, None

    def kv_block_bytes(
        self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> int:
        return 2 * num_layers * block_size * num_kv_heads * head_dim * self.dtype.itemsize

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KvCache:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        return torch.full(shape, torch.nan, dtype=self.dtype)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        weight, bias = packed
        result = x.double() @ weight.double().T
        if bias is not None:
            result = result + bias.double()
        return result.to(x.dtype)

    def embedding(self, ids: Tensor, table: PackedEmbedding) -> Tensor:
        return table[ids]

    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        return x[indices]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x64 = x.double()
        scale = 1 / torch.sqrt((x64 * x64).mean(-1, keepdim=True) + eps)
        return (x64 * scale * weight.double()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.double().chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)

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
        rotated_key = _rotate(key, cos_sin_table[key_positions])
        block_size = kv_layer.shape[2]
        for token, slot in enumerate(slot_mapping.tolist()):
            kv_layer[0, slot // block_size, slot % block_size] = rotated_key[token]
            kv_layer[1, slot // block_size, slot % block_size] = value[token]
        return _rotate(query, cos_sin_table[query_positions])

    def plan_attention(
        self,
        cu_seqlens: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        rows: Tensor | None = None,
    ) -> AttentionPlan:
        if rows is not None:
            seq_lens, block_table = seq_lens[rows], block_table[rows]
        return cu_seqlens.tolist(), seq_lens.tolist(), block_table, block_size

    def paged_attention(
        self,
        query: Tensor,
        kv_layer: KvLayer,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        cu_seqlens, seq_lens, block_table, block_size = plan
        group = query.shape[1] // kv_layer.shape[3]
        result = torch.empty_like(query)
        for i, seq_len in enumerate(seq_lens):
            positions = torch.arange(seq_len)
            blocks = block_table[i, positions // block_size].long()
            key, value = kv_layer[:, blocks, positions % block_size].double()
            first, last = cu_seqlens[i], cu_seqlens[i + 1]
            for token in range(first, last):
                position = seq_len - (last - token)
                oldest = max(0, position + 1 - sliding_window) if sliding_window else 0
                for head in range(query.shape[1]):
                    keys = key[oldest : position + 1, head // group]
                    values = value[oldest : position + 1, head // group]
                    scores = keys @ query[token, head].double() * scale
                    if soft_cap:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    attended = torch.softmax(scores, dim=0) @ values
                    result[token, head] = attended.to(query.dtype)
        return result

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        for row, words in zip(rows.tolist(), allowed.tolist(), strict=True):
            for token in range(logits.shape[1]):
                if not words[token // 32] >> token % 32 & 1:
                    logits[row, token] = -torch.inf

    def bias_logits(self, logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
        for row, token, bias in zip(rows, token_ids, biases, strict=True):
            logits[row, token] += bias

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
        for i, row in enumerate(rows.tolist()):
            tokens = token_ids[i, : seq_lens[i]].tolist()
            output = tokens[prompt_lens[i] :]
            for token in set(tokens):
                logit = logits[row, token]
                logit = logit / repetition[i] if logit > 0 else logit * repetition[i]
                if token in output:
                    logit = logit - (presence[i] + output.count(token) * frequency[i])
                logits[row, token] = logit

    def probabilities(
        self, logits: Tensor, temperature: float, min_p: float, top_k: int, top_p: float
    ) -> Tensor:
        """The distribution that `sample` draws from for one row of logits [V], float64 [V]."""
        result = torch.zeros(len(logits), dtype=torch.float64)
        if temperature < GREEDY_TEMPERATURE or top_p <= 0:
            result[int(logits.argmax())] = 1
            return result
        probabilities = torch.softmax(logits.double() / temperature, dim=0)
        ranked = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
        most = float(probabilities.max())
        ranked = [token for token in ranked if float(probabilities[token]) >= min_p * most]
        if top_k:
            ranked = ranked[:top_k]
        if top_p < 1:
            total = sum(float(probabilities[token]) for token in ranked)
            kept, mass = 0, 0.0
            while mass < top_p * total and kept < len(ranked):
                mass += float(probabilities[ranked[kept]])
                kept += 1
            ranked = ranked[:kept]
        result[ranked] = probabilities[ranked]
        return result / result.sum()

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
        noise = gumbel_noise(seeds, positions, logits.shape[1]).double()
        rows = []
        for i in range(len(logits)):
            if not bool(logits[i].max().isfinite()):
                rows.append(torch.tensor(-1))
                continue
            probabilities = self.probabilities(
                logits[i], float(temperature[i]), float(min_p[i]), int(top_k[i]), float(top_p[i])
            )
            rows.append(torch.argmax(torch.log(probabilities) + noise[i]))
        return torch.stack(rows, out=out)

    def token_logprobs(
        self, logits: Tensor, chosen: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.log_softmax(logits.double(), dim=-1).float()
        top_logprobs, top_ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
        rows = torch.arange(len(logits))
        return logprobs[rows, chosen], top_ids[:, :num_top], top_logprobs[:, :num_top]


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
