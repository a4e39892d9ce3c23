"""Weights from any file into the form the decoder computes with: fused, typed, laid out once."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.gguf_file import GgufFile
from engine_svc.compute.model.safetensors_files import SafetensorsFiles
from engine_svc.compute.model.tensor_part import WHOLE, TensorPart
from kernels import Kernels, PackedEmbedding, PackedLinear, StoredKind, StoredMatrix
from protos.wire.errors import StartupError

# Of each file, what tells another file of the same size and time.
_HEAD_BYTES = 1 << 20


class WeightSource(Protocol):
    """A model, or what one of several ranks has of it. Names are Hugging Face's; shapes [out, in].

    `config` is that of what it gives.
    """

    path: Path
    config: ModelConfig

    @property
    def files(self) -> Sequence[Path]:
        """All that the model is read from."""
        ...

    @property
    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor: ...

    def stored(self, name: str, kinds: Set[StoredKind]) -> StoredMatrix | None:
        """A matrix as the file holds it, not copied, if that is of one of `kinds`.

        Else as float32 that is decoded when it is packed, if F32 is one of them; else None.
        """
        ...

    def rope_frequency_factors(self) -> Tensor | None: ...


class WeightFiles(WeightSource, Protocol):
    """A model's file or files, of which parts of tensors can be read without the rest."""

    def read(self, name: str, part: TensorPart = WHOLE) -> Tensor: ...

    def stored(
        self, name: str, kinds: Set[StoredKind], part: TensorPart = WHOLE
    ) -> StoredMatrix | None:
        """As of a `WeightSource`; its rows may have others between them in the memory map."""
        ...

    def column_group(self, name: str) -> int:
        """So many columns share a scale: at its multiples they can be parted as they are stored."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. The last keeps `query` apart, which it needs only for tokens that are sampled."""

    input_norm: Tensor
    projections: Sequence[PackedLinear]  # (q, k and v,) or (q, k and v)
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    post_attention_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: PackedEmbedding  # [vocab_size, hidden_size]
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: PackedLinear


def open_source(model: Path) -> WeightFiles:
    """Opens an HF directory or a GGUF file, and checks that it has what its config promises.

    Raises StartupError, before anything is sized by what the config says.
    """
    if not model.exists():
        raise StartupError(f"there is no model at {model}")
    source: WeightFiles = SafetensorsFiles(model) if model.is_dir() else GgufFile(model)
    check_tensors(source)
    return source


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model with this config must have."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.query_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (query_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query_size, config.output_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{layer}.{name}.weight"] = (size,)
    return shapes


def check_tensors(source: WeightSource) -> None:
    """StartupError that names the tensors which are missing or of another shape."""
    shapes = expected_shapes(source.config)
    missing = [name for name in shapes if name not in source.names]
    if missing:
        listed = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise StartupError(f"{source.path} lacks {len(missing)} tensors: {listed}")
    for name, shape in shapes.items():
        if source.shape(name) != shape:
            raise StartupError(
                f"{source.path}: {name} has shape {list(source.shape(name))}, "
                f"and {list(shape)} by the model's config"
            )
    factors = source.rope_frequency_factors()
    if factors is not None:
        if factors.shape != (source.config.head_dim // 2,):
            raise StartupError(
                f"{source.path}: the factors of rotary frequencies have shape "
                f"{list(factors.shape)}, and [{source.config.head_dim // 2}] by the model's config"
            )
        if not bool((factors.isfinite() & (factors > 0)).all()):
            raise StartupError(f"{source.path}: a factor of rotary frequencies is not positive")


def weight_bytes(source: WeightSource, kernels: Kernels, dtype: torch.dtype) -> int:
    """What a model's weights take once they are loaded."""
    config, kinds = source.config, kernels.stored_kinds
    total = 0
    for name, shape in expected_shapes(config).items():
        stored = source.stored(name, kinds) if len(shape) == 2 else None
        if stored is None:
            total += math.prod(shape) * dtype.itemsize
        else:
            total += kernels.packed_bytes(stored.kind, *shape)
    if config.tie_word_embeddings and not kinds:
        # The head is laid out for products, the embedding for look-ups.
        total += config.vocab_size * config.hidden_size * dtype.itemsize
    return total


def identity(source: WeightSource) -> str:
    """A digest that changes when a file of the model does: of sizes, times and beginnings."""
    digest = hashlib.sha256()
    try:
        for path in source.files:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
                digest.update(file.read(_HEAD_BYTES))
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def load_weights(
    source: WeightSource, kernels: Kernels, dtype: torch.dtype, report: Callable[[str], None]
) -> DecoderWeights:
    """Packs every matrix, one layer after the other, and reads the rest as `dtype`.

    Besides the result only what is packed at once is in memory. Packed weights may be found on
    disk, or be kept there. `report` gets a line now and then.
    """
    loader = _Loader(source, kernels, dtype)
    num_layers = source.config.num_layers
    num_bytes = weight_bytes(source, kernels, dtype)
    with kernels.keep_packed(source.path, identity(source), num_bytes, report):
        layers = []
        for index in range(num_layers):
            layers.append(loader.layer(index, is_last=index == num_layers - 1))
            if (index + 1) % max(1, num_layers // 4) == 0:
                report(f"loaded {index + 1} of {num_layers} layers")
        embedding = kernels.pack_embedding(loader.matrix("model.embed_tokens.weight"))
        if source.config.tie_word_embeddings:
            head = kernels.tied_head(embedding)
        else:
            head = kernels.pack_linear([loader.matrix("lm_head.weight")])
    return DecoderWeights(embedding, layers, loader.tensor("model.norm.weight"), head)


class _Loader:
    def __init__(self, source: WeightSource, kernels: Kernels, dtype: torch.dtype) -> None:
        self._source = source
        self._kernels = kernels
        self._dtype = dtype
        self._names = expected_shapes(source.config).keys()

    def tensor(self, name: str) -> Tensor:
        return self._source.read(name).to(self._dtype)

    def matrix(self, name: str) -> Tensor | StoredMatrix:
        """As the kernels like it best."""
        stored = self._source.stored(name, self._kernels.stored_kinds)
        if stored is None:
            return self.tensor(name)
        return replace(stored, data=np.ascontiguousarray(stored.data))

    def layer(self, index: int, is_last: bool) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        fused = [["q_proj", "k_proj", "v_proj"]]
        if is_last:
            fused = [["q_proj"], ["k_proj", "v_proj"]]
        has_norms = self._source.config.qk_norm
        return LayerWeights(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            projections=[self._linear(f"{attention}.{name}" for name in names) for names in fused],
            query_norm=self.tensor(f"{attention}.q_norm.weight") if has_norms else None,
            key_norm=self.tensor(f"{attention}.k_norm.weight") if has_norms else None,
            output=self._linear([f"{attention}.o_proj"]),
            post_attention_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=self._linear([f"{mlp}.down_proj"]),
        )

    def _linear(self, names: Iterable[str]) -> PackedLinear:
        """One linear layer of several, their rows one below the other."""
        names = list(names)
        bias = None
        if f"{names[0]}.bias" in self._names:
            bias = torch.cat([self.tensor(f"{name}.bias") for name in names])
        return self._kernels.pack_linear([self.matrix(f"{name}.weight") for name in names], bias)
