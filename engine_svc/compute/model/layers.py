"""A layer of a Llama-family decoder, attention and MLP, in its usual form and as the last one."""

from dataclasses import dataclass

from torch import Tensor

from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.weights import LayerWeights
from engine_svc.compute.ranks import Ranks
from kernels import AttentionPlan, Kernels, KvLayer


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer of one step shares. `T` tokens, of which `K` are kept to the end."""

    cos_sin_table: Tensor  # [max_model_len, head_dim]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    attention_plan: AttentionPlan
    kept_indices: Tensor  # [K] of the T tokens
    kept_positions: Tensor  # [K]
    kept_attention_plan: AttentionPlan


class DecoderLayer:
    """normed -> attention, added to the residual -> norm -> MLP, whose sum is left to the caller,
    so that it is fused with the norm that follows.

    Each of several ranks has some heads and some of the MLP; their outputs are summed.
    """

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        weights: LayerWeights,
        sliding_window: int,
        ranks: Ranks,
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._weights = weights
        self._ranks = ranks
        self._sliding_window = sliding_window
        self._scale = config.head_dim**-0.5

    @property
    def input_norm(self) -> Tensor:
        return self._weights.input_norm

    def forward(
        self, normed: Tensor, residual: Tensor, step: StepContext, kv_layer: KvLayer
    ) -> Tensor:
        """normed, residual [T, hidden]; adds attention to `residual`, returns the MLP's output."""
        config = self._config
        (projection,) = self._weights.projections
        query, key, value = self._kernels.linear(normed, projection).split(
            [config.query_size, config.kv_size, config.kv_size], dim=-1
        )
        query = self._rope_and_cache(query, step.positions, key, value, step, kv_layer)
        return self._attend_and_mlp(query, residual, step.attention_plan, kv_layer)

    def forward_kept(
        self, normed: Tensor, residual: Tensor, step: StepContext, kv_layer: KvLayer
    ) -> tuple[Tensor, Tensor]:
        """The last layer: keys and values of all T tokens, the rest for the K kept ones only.

        Returns the residual and the MLP's output of those, [K, hidden] each.
        """
        config = self._config
        query_projection, key_value_projection = self._weights.projections
        key, value = self._kernels.linear(normed, key_value_projection).split(
            [config.kv_size, config.kv_size], dim=-1
        )
        normed = self._kernels.take_rows(normed, step.kept_indices)
        query = self._kernels.linear(normed, query_projection)
        query = self._rope_and_cache(query, step.kept_positions, key, value, step, kv_layer)
        residual = self._kernels.take_rows(residual, step.kept_indices)
        if not len(residual):
            return residual, residual
        output = self._attend_and_mlp(query, residual, step.kept_attention_plan, kv_layer)
        return residual, output

    def _rope_and_cache(
        self,
        query: Tensor,
        query_positions: Tensor,
        key: Tensor,
        value: Tensor,
        step: StepContext,
        kv_layer: KvLayer,
    ) -> Tensor:
        heads = (-1, self._config.head_dim)
        return self._kernels.rope_and_cache(
            query.unflatten(-1, heads),
            query_positions,
            key.unflatten(-1, heads),
            value.unflatten(-1, heads),
            step.positions,
            step.cos_sin_table,
            kv_layer,
            step.slot_mapping,
            self._weights.query_norm,
            self._weights.key_norm,
            self._config.rms_norm_eps,
        )

    def _attend_and_mlp(
        self, query: Tensor, residual: Tensor, plan: AttentionPlan, kv_layer: KvLayer
    ) -> Tensor:
        kernels, weights = self._kernels, self._weights
        attended = kernels.paged_attention(query, kv_layer, plan, self._scale, self._sliding_window)
        output = self._ranks.sum_over_ranks(kernels.linear(attended.flatten(1), weights.output))
        normed = kernels.add_rms_norm(
            output, residual, weights.post_attention_norm, self._config.rms_norm_eps
        )
        gate_up = kernels.linear(normed, weights.gate_up)
        down = kernels.linear(kernels.silu_and_mul(gate_up), weights.down)
        return self._ranks.sum_over_ranks(down)
