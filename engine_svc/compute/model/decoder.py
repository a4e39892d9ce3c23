"""The whole decoder: token ids in, logits of the tokens that are asked about out."""

from itertools import pairwise

from torch import Tensor

from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.layers import DecoderLayer, StepContext
from engine_svc.compute.model.weights import DecoderWeights
from engine_svc.compute.step_tensors import StepInputs
from kernels import Kernels


class Decoder:
    """A Llama-family decoder on one device.

    `cos_sin_table` [max_model_len, head_dim] is that of rotary.py.
    """

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        weights: DecoderWeights,
        cos_sin_table: Tensor,
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._head = weights.head
        self._cos_sin_table = cos_sin_table
        self._layers = [
            DecoderLayer(kernels, config, layer, window)
            for layer, window in zip(weights.layers, config.sliding_windows, strict=True)
        ]

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def forward(self, inputs: StepInputs, kv_cache: Tensor) -> Tensor:
        """Computes a step's tokens; returns what `logits` takes of those kept, [K, hidden].

        kv_cache [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        kernels, eps = self._kernels, self._config.rms_norm_eps
        step = self._context(inputs, block_size=kv_cache.shape[3])
        residual = kernels.embedding(inputs.token_ids, self._embedding)
        normed = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for (layer, following), kv_layer in zip(pairwise(self._layers), kv_cache, strict=False):
            output = layer.forward(normed, residual, step, kv_layer)
            normed = kernels.add_rms_norm(output, residual, following.input_norm, eps)
        residual, output = self._layers[-1].forward_kept(normed, residual, step, kv_cache[-1])
        if not len(residual):
            return residual
        return kernels.add_rms_norm(output, residual, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> float32 [n, vocab_size]; at least one."""
        return self._kernels.linear(hidden, self._head).float()

    def _context(self, inputs: StepInputs, block_size: int) -> StepContext:
        plan = self._kernels.plan_attention(
            inputs.cu_seqlens, inputs.seq_lens, inputs.block_table, block_size
        )
        kept_plan = plan
        if not inputs.keeps_every_token:
            kept_plan = self._kernels.plan_attention(
                inputs.kept_cu_seqlens,
                inputs.seq_lens[inputs.kept_sequences],
                inputs.block_table[inputs.kept_sequences],
                block_size,
            )
        cos_sin = self._kernels.embedding(inputs.positions, self._cos_sin_table)
        return StepContext(
            cos_sin=cos_sin,
            slot_mapping=inputs.slot_mapping,
            attention_plan=plan,
            kept_indices=inputs.kept_indices,
            kept_cos_sin=cos_sin[inputs.kept_indices],
            kept_attention_plan=kept_plan,
        )
