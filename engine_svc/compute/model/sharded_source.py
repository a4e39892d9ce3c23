"""What one of several ranks has of a model's weights: some heads, MLP columns and vocabulary.

Tensor parallelism as of Megatron-LM (Shoeybi et al., 2019): q, k, v, gate and up are parted by
rows, o and down by columns, whose products are summed over ranks; embedding and head by tokens.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.tensor_part import TensorPart
from engine_svc.compute.model.weights import WeightFiles, WeightSource
from kernels import StoredKind, StoredMatrix
from protos.wire.errors import StartupError

# Tokens come in such groups, so that each word of a mask, and each group of noise, is one rank's.
_VOCAB_GROUP: Final = 32
# Rows of so many values begin at addresses that matrix products like.
_ALIGNED: Final = (16, 8, 1)
_MOST_RANKS: Final = 64
# Their inputs are parted, so each rank's output lacks those of the others.
_ROW_PARALLEL: Final = frozenset({"o_proj", "down_proj"})


class VocabShard(NamedTuple):
    """The tokens [first, first + size) of `whole_size`."""

    first: int
    size: int
    whole_size: int


class ShardedSource:
    """Rank `rank` of `size` ranks. A `WeightSource` (see weights.py), of the rank's shapes.

    Heads are shared equally. Where there are fewer KV heads than ranks, several ranks have the
    same one. The MLP's columns and the vocabulary are shared as equally as their groups allow.
    """

    def __init__(self, files: WeightFiles, rank: int, size: int) -> None:
        """Raises StartupError in one line where so many ranks cannot share the model."""
        whole = files.config
        _check_heads(whole, size)
        query = _span(whole.num_heads, 1, rank, size)
        first_kv = rank * whole.num_kv_heads // size
        num_kv = max(1, whole.num_kv_heads // size)
        intermediate = _span(whole.intermediate_size, _column_unit(files, size), rank, size)
        vocab = _span(whole.vocab_size, _VOCAB_GROUP, rank, size)
        self._files = files
        self._rank = rank
        self.path: Path = files.path
        self.vocab = VocabShard(vocab.start, _length(vocab), whole.vocab_size)
        self.config = replace(
            whole,
            num_heads=_length(query),
            num_kv_heads=num_kv,
            intermediate_size=_length(intermediate),
            vocab_size=self.vocab.size,
        )
        query_values = _times(query, whole.head_dim)
        kv_values = _times(slice(first_kv, first_kv + num_kv), whole.head_dim)
        self._parts: Mapping[str, TensorPart] = {
            "embed_tokens": TensorPart(rows=vocab),
            "lm_head": TensorPart(rows=vocab),
            "q_proj": TensorPart(rows=query_values),
            "k_proj": TensorPart(rows=kv_values),
            "v_proj": TensorPart(rows=kv_values),
            "o_proj": TensorPart(columns=query_values),
            "gate_proj": TensorPart(rows=intermediate),
            "up_proj": TensorPart(rows=intermediate),
            "down_proj": TensorPart(columns=intermediate),
        }

    @property
    def files(self) -> list[Path]:
        return list(self._files.files)

    @property
    def names(self) -> frozenset[str]:
        return self._files.names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(
            len(range(*wanted.indices(size)))
            for size, wanted in zip(self._files.shape(name), self._part(name), strict=False)
        )

    def read(self, name: str) -> Tensor:
        tensor = self._files.read(name, self._part(name))
        if self._rank and name.endswith(".bias") and _module(name) in _ROW_PARALLEL:
            # The sum over ranks has it once.
            return torch.zeros_like(tensor)
        return tensor

    def stored(self, name: str, kinds: Set[StoredKind]) -> StoredMatrix | None:
        """See `WeightSource`. Columns that share a scale with others' come as floats."""
        return self._files.stored(name, kinds, self._part(name))

    def rope_frequency_factors(self) -> Tensor | None:
        return self._files.rope_frequency_factors()

    def _part(self, name: str) -> TensorPart:
        return self._parts.get(_module(name), TensorPart())


def shard_of(files: WeightFiles, rank: int, size: int) -> tuple[WeightSource, VocabShard]:
    """What a rank computes with; all of it where there is one."""
    if size == 1:
        num_tokens = files.config.vocab_size
        return files, VocabShard(0, num_tokens, num_tokens)
    source = ShardedSource(files, rank, size)
    return source, source.vocab


def _check_heads(config: ModelConfig, size: int) -> None:
    def may_share(num_ranks: int) -> bool:
        num_kv_heads = config.num_kv_heads
        shares_kv = num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
        return config.num_heads % num_ranks == 0 and shares_kv

    if not may_share(size):
        possible = [str(number) for number in range(1, _MOST_RANKS + 1) if may_share(number)]
        raise StartupError(
            f"{size} ranks cannot share a model with {config.num_heads} heads over "
            f"{config.num_kv_heads} KV heads; --tensor-parallel may be {', '.join(possible)}"
        )
    if config.vocab_size <= _VOCAB_GROUP * (size - 1) or config.intermediate_size < size:
        raise StartupError(
            f"{size} ranks cannot share a model with {config.vocab_size} tokens and an MLP of "
            f"{config.intermediate_size}: it is too small"
        )


def _column_unit(files: WeightFiles, size: int) -> int:
    """Of how many columns of the MLP a rank's share consists, so that few of them, or none, have
    to be taken apart from others."""
    columns = files.config.intermediate_size
    group = max(
        files.column_group(f"model.layers.{index}.mlp.down_proj.weight")
        for index in range(files.config.num_layers)
    )
    units = (max(group, _ALIGNED[0]), *_ALIGNED)
    return next(unit for unit in units if columns % unit == 0 and columns // unit >= size)


def _span(total: int, unit: int, rank: int, size: int) -> slice:
    """The rank's share of `total`, in whole units but for the end; the first ranks have more."""
    num_units = -(-total // unit)
    each, more = divmod(num_units, size)
    first = rank * each + min(rank, more)
    end = first + each + (rank < more)
    return slice(min(first * unit, total), min(end * unit, total))


def _times(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)


def _length(span: slice) -> int:
    return span.stop - span.start


def _module(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.split(".")[-2]
