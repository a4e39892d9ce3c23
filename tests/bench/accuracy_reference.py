"""A decoder in plain float32, written for clarity, that the engine's answers are held against."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_svc.compute.model.rotary import cos_sin_table
from engine_svc.compute.model.weights import open_source
from tests.fakes.float_weights import float_weights


class ReferenceModel:
    """A Llama-family model, its weights dequantised to float32; one window of tokens at a time."""

    def __init__(self, model: Path) -> None:
        source = open_source(model)
        self.config = source.config
        self._rope_factors = source.rope_frequency_factors()
        self._weights = float_weights(model)

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int]) -> list[Tensor]:
        """The residual stream [T, hidden] before the first layer and after each."""
        config = self.config
        states = [self._weights["model.embed_tokens.weight"][torch.tensor(token_ids)]]
        table = cos_sin_table(config.rope, config.head_dim, len(token_ids), self._rope_factors)
        with _all_threads():
            for index in range(config.num_layers):
                attended = states[-1] + self._attention(index, states[-1], table)
                states.append(attended + self._mlp(index, attended))
        return states

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Natural-log probabilities [T - 1] of each token after the first, given those before."""
        last = self._norm("model.norm.weight", self.states(token_ids)[-1][:-1])
        tied = self.config.tie_word_embeddings
        head = self._weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        chosen = torch.tensor(token_ids[1:])[:, None]
        with _all_threads():
            return (last @ head.T).log_softmax(-1).gather(1, chosen)[:, 0]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self._weights[name]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _attention(self, index: int, state: Tensor, table: Tensor) -> Tensor:
        config, layer = self.config, f"model.layers.{index}"
        x = self._norm(f"{layer}.input_layernorm.weight", state)
        query, key, value = (
            self._linear(f"{layer}.self_attn.{part}_proj", x).unflatten(-1, (-1, config.head_dim))
            for part in "qkv"
        )
        if config.qk_norm:
            query = self._norm(f"{layer}.self_attn.q_norm.weight", query)
            key = self._norm(f"{layer}.self_attn.k_norm.weight", key)
        # [heads, T, head_dim], each KV head repeated for its query heads.
        repeats = config.num_heads // config.num_kv_heads
        query = _rotate(query, table).transpose(0, 1)
        key = _rotate(key, table).transpose(0, 1).repeat_interleave(repeats, 0)
        value = value.transpose(0, 1).repeat_interleave(repeats, 0)
        scores = query @ key.transpose(1, 2) * config.head_dim**-0.5
        scores = scores.masked_fill(~_visible(len(x), config.sliding_windows[index]), -torch.inf)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        return self._linear(f"{layer}.self_attn.o_proj", attended)

    def _mlp(self, index: int, state: Tensor) -> Tensor:
        layer = f"model.layers.{index}"
        x = self._norm(f"{layer}.post_attention_layernorm.weight", state)
        gate = self._linear(f"{layer}.mlp.gate_proj", x)
        up = self._linear(f"{layer}.mlp.up_proj", x)
        return self._linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)


@contextmanager
def _all_threads() -> Iterator[None]:
    """An engine with threads of its own leaves torch one."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [T, heads, head_dim], table [T, head_dim] of cosines, then sines."""
    cos, sin = table[:, None].chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _visible(num_tokens: int, sliding_window: int) -> Tensor:
    """bool [T, T]: which tokens (columns) each token (row) attends to."""
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    visible = distance >= 0
    return visible & (distance < sliding_window) if sliding_window else visible
