"""The whole decoder: token ids in, logits of the tokens that are asked about out."""

from itertools import pairwise

from torch import Tensor

from engine_svc.compute.kv_storage import KvStorage
from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.layers import DecoderLayer, StepContext
from engine_svc.compute.model.sharded_source import VocabShard
from engine_svc.compute.model.weights import DecoderWeights
from engine_svc.compute.ranks import ONE_RANK, Ranks
from engine_svc.compute.step_tensors import StepInputs
from kernels import Kernels


class Decoder:
    """A Llama-family decoder on one device, or a rank's share of one.

    `cos_sin_table` [max_model_len, head_dim] is that of rotary.py. With several `ranks`, `config`,
    `weights` and `vocab` are what this one has.
    """

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        weights: DecoderWeights,
        cos_sin_table: Tensor,
        ranks: Ranks = ONE_RANK,
        vocab: VocabShard | None = None,
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._ranks = ranks
        self._vocab = vocab or VocabShard(0, config.vocab_size, config.vocab_size)
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._head = weights.head
        self._cos_sin_table = cos_sin_table
        self._layers = [
            DecoderLayer(kernels, config, layer, window, ranks)
            for layer, window in zip(weights.layers, config.sliding_windows, strict=True)
        ]

    def forward(self, inputs: StepInputs, kv: KvStorage) -> Tensor:
        """Computes a step's tokens; returns the hidden states of those kept, [K, hidden]."""
        kernels, eps = self._kernels, self._config.rms_norm_eps
        step = self._context(inputs, kv.block_size)
        residual = self._embed(inputs.token_ids)
        normed = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, (layer, following) in enumerate(pairwise(self._layers)):
            output = layer.forward(normed, residual, step, kv.layers[index])
            normed = kernels.add_rms_norm(output, residual, following.input_norm, eps)
        residual, output = self._layers[-1].forward_kept(
            normed, residual, step, kv.layers[len(self._layers) - 1]
        )
        if not len(residual):
            return residual
        return kernels.add_rms_norm(output, residual, self._norm, eps)

    def logits(self, hidden: Tensor, places: Tensor) -> Tensor:
        """After rows `places` [s] of hidden [K, hidden] -> float32 [s, vocab_size]; s > 0.

        A rank gives those of its own tokens.
        """
        kept = self._kernels.take_rows(hidden, places)
        return self._kernels.logits(kept, self._head)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, hidden]; each rank looks up its own tokens, of others it has 0."""
        if self._ranks.size == 1:
            return self._kernels.embedding(token_ids, self._embedding)
        places = token_ids - self._vocab.first
        is_own = (places >= 0) & (places < self._vocab.size)
        found = self._kernels.embedding(places.masked_fill_(~is_own, 0), self._embedding)
        return self._ranks.sum_over_ranks(found.masked_fill_(~is_own[:, None], 0))

    def _context(self, inputs: StepInputs, block_size: int) -> StepContext:
        plan = kept_plan = self._kernels.plan_attention(
            inputs.cu_seqlens, inputs.seq_lens, inputs.block_table, block_size, inputs.rows
        )
        if not inputs.keeps_every_token and len(inputs.kept_indices):
            kept_plan = self._kernels.plan_attention(
                inputs.kept_cu_seqlens,
                inputs.seq_lens,
                inputs.block_table,
                block_size,
                inputs.kept_rows,
            )
        return StepContext(
            cos_sin_table=self._cos_sin_table,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            attention_plan=plan,
            kept_indices=inputs.kept_indices,
            kept_positions=inputs.kept_positions,
            kept_attention_plan=kept_plan,
        )
