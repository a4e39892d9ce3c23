"""GGUF files: metadata as a ModelConfig, tensors as stored or dequantised, by HF's names."""

import re
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine_svc.compute.model import config as model_config
from engine_svc.compute.model.config import ModelConfig, RopeConfig
from engine_svc.compute.model.config_checks import first_given, number, size, window
from engine_svc.compute.model.gguf_header import GgufTensor, read_gguf
from engine_svc.compute.model.tensor_part import WHOLE, TensorPart
from kernels import StoredKind, StoredMatrix
from protos.wire.errors import StartupError

# GGUF files of Mistral models say that they are Llama.
ARCHITECTURES = {
    "llama": model_config.LLAMA,
    "qwen2": model_config.QWEN2,
    "qwen3": model_config.QWEN3,
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_STORED_KINDS = {
    GGMLQuantizationType.F32: StoredKind.F32,
    GGMLQuantizationType.F16: StoredKind.F16,
    GGMLQuantizationType.BF16: StoredKind.BF16,
    GGMLQuantizationType.Q4_0: StoredKind.Q4_0,
    GGMLQuantizationType.Q4_1: StoredKind.Q4_1,
    GGMLQuantizationType.Q4_K: StoredKind.Q4_K,
    GGMLQuantizationType.Q8_0: StoredKind.Q8_0,
}
_ROPE_FACTORS = "rope_freqs.weight"
# Rows dequantised at once: bounds what the temporaries of a large embedding take.
_CHUNK_VALUES = 1 << 24


class GgufFile:
    """One model file, memory-mapped. `WeightFiles` (see weights.py)."""

    def __init__(self, path: Path) -> None:
        try:
            header = read_gguf(path)
        except OSError as error:
            raise StartupError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise StartupError(f"{path} is not a readable GGUF file: {_line(error)}") from error
        self.path = path
        self._metadata = header.metadata
        named = ((hugging_face_name(tensor.name), tensor) for tensor in header.tensors.values())
        self._tensors = {name: tensor for name, tensor in named if name is not None}
        self._rope_factors = header.tensors.get(_ROPE_FACTORS)
        try:
            if self._value("split.count", 1) > 1:
                raise StartupError(
                    f"{path} is one part of several; join them with gguf-split first"
                )
            self.config = self._read_config()
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise StartupError(
                f"{path} holds metadata of the wrong kind: {_line(error)}"
            ) from error

    @property
    def files(self) -> list[Path]:
        return [self.path]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored(
        self, name: str, kinds: Set[StoredKind], part: TensorPart = WHOLE
    ) -> StoredMatrix | None:
        """See `WeightSource`. The rows stay in the memory map."""
        rows = self._rows(name, part)
        kind = _STORED_KINDS.get(rows.kind)
        if kind in kinds and rows.are_whole_groups:
            return StoredMatrix(kind, rows.data, rows.num_columns, rows.order)
        if StoredKind.F32 in kinds:
            return StoredMatrix(
                StoredKind.F32, rows.data, rows.num_columns, rows.order, partial(self._values, rows)
            )
        return None

    def read(self, name: str, part: TensorPart = WHOLE) -> Tensor:
        """The tensor, or a part of it, in float32, in Hugging Face's order."""
        rows = self._rows(name, part)
        values = np.empty((len(rows.data), rows.num_columns), np.float32)
        step = max(1, _CHUNK_VALUES // rows.num_columns)
        for start in range(0, len(values), step):
            values[start : start + step] = self._values(rows, rows.data[start : start + step])
        if len(self._tensors[name].shape) == 1:
            values = values[0]
        return torch.from_numpy(values if rows.order is None else values[rows.order])

    def column_group(self, name: str) -> int:
        return GGML_QUANT_SIZES[self._tensors[name].kind][0]

    def rope_frequency_factors(self) -> Tensor | None:
        """What each rotary frequency is divided by [head_dim / 2], in files of Llama 3.1 and on."""
        if self._rope_factors is None:
            return None
        factors = self._decode(self._rope_factors.kind, self._rope_factors.data)
        return torch.from_numpy(np.array(factors.reshape(self._rope_factors.shape)))

    def _rows(self, name: str, part: TensorPart) -> "_Rows":
        tensor, order = self._tensors[name], self._row_order(name)
        if order is not None and part.rows != WHOLE.rows:
            # Whole heads, each of which is reordered in itself.
            order = order[part.rows] - part.rows.start
        if len(tensor.shape) == 1:
            return _Rows(tensor, WHOLE.rows, part.rows, order)
        return _Rows(tensor, part.rows, part.columns, order)

    def _values(self, rows: "_Rows", data: np.ndarray) -> np.ndarray:
        """Of some of the rows' bytes the float32 of their columns."""
        return self._decode(rows.kind, data)[:, rows.columns]

    def _decode(self, kind: GGMLQuantizationType, rows: np.ndarray) -> np.ndarray:
        """Rows of bytes to rows of float32."""
        try:
            return dequantize(rows, kind)
        except NotImplementedError as error:
            raise StartupError(f"{self.path}: cannot read tensors of type {kind.name}") from error

    def _row_order(self, name: str) -> np.ndarray | None:
        """Which of the file's rows are the tensor's, where the file has them in another order.

        Converters to GGUF reorder q and k of Llama from halves of a head to rotary pairs side by
        side: (0, dim/2), (1, dim/2 + 1), …
        """
        if self.config.architecture != model_config.LLAMA:
            return None
        if ".q_proj." in name:
            num_heads = self.config.num_heads
        elif ".k_proj." in name:
            num_heads = self.config.num_kv_heads
        else:
            return None
        pairs = np.arange(self.shape(name)[0]).reshape(num_heads, -1, 2)
        return pairs.swapaxes(1, 2).ravel()

    def _value(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(key, default)

    def _read_config(self) -> ModelConfig:
        family = self._value("general.architecture")
        if family not in ARCHITECTURES:
            raise StartupError(
                f"unknown GGUF architecture {family!r}; known are {', '.join(ARCHITECTURES)}"
            )
        if self._value(f"{family}.expert_count", 0):
            raise StartupError(f"{self.path}: mixtures of experts are not supported")

        def required(key: str) -> Any:
            value = self._value(f"{family}.{key}")
            if value is None:
                raise StartupError(f"{self.path} lacks the metadata {family}.{key}")
            return value

        num_heads = size("num_heads", required("attention.head_count"))
        hidden_size = size("hidden_size", required("embedding_length"))
        head_dim = size(
            "head_dim",
            first_given(
                self._value(f"{family}.attention.key_length"),
                self._value(f"{family}.rope.dimension_count"),
                hidden_size // num_heads,
            ),
        )
        if self._value(f"{family}.rope.dimension_count", head_dim) != head_dim:
            raise StartupError("rotary embeddings over part of a head are not supported")
        num_layers = size("num_layers", required("block_count"))
        if "model.embed_tokens.weight" not in self._tensors:
            raise StartupError(f"{self.path} lacks the tensor token_embd.weight")
        max_model_len = size("max_model_len", required("context_length"))
        sliding_window = window(self._value(f"{family}.attention.sliding_window"))
        return ModelConfig(
            architecture=ARCHITECTURES[family],
            vocab_size=self.shape("model.embed_tokens.weight")[0],
            hidden_size=hidden_size,
            intermediate_size=size("intermediate_size", required("feed_forward_length")),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=size(
                "num_kv_heads", self._value(f"{family}.attention.head_count_kv", num_heads)
            ),
            head_dim=head_dim,
            rms_norm_eps=number("rms_norm_eps", required("attention.layer_norm_rms_epsilon")),
            max_model_len=max_model_len,
            rope=self._rope(family, max_model_len),
            sliding_windows=(sliding_window,) * num_layers,
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            output_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self._tensors,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in self._tensors,
        )

    def _rope(self, family: str, max_model_len: int) -> RopeConfig:
        def scaling(key: str, default: Any) -> Any:
            return self._value(f"{family}.rope.scaling.{key}", default)

        kind = {"none": "default"}.get(scaling("type", "none"), scaling("type", "none"))
        model_config.check_rope_kind(kind)
        # Files older than `rope.scaling` give a linear factor as `rope.scale_linear`.
        factor = float(scaling("factor", self._value(f"{family}.rope.scale_linear", 1.0)))
        if kind == "default" and factor != 1.0:
            kind = "linear"
        attention_factor = 1.0
        if kind == "yarn":
            attention_factor = float(scaling("attn_factor", 1.0))
            attention_factor *= model_config.yarn_attention_factor(factor)
        return RopeConfig(
            theta=float(self._value(f"{family}.rope.freq_base", 10000.0)),
            kind=kind,
            factor=factor,
            original_max_position=size(
                "original_max_position", scaling("original_context_length", max_model_len)
            ),
            beta_fast=float(scaling("yarn_beta_fast", 32.0)),
            beta_slow=float(scaling("yarn_beta_slow", 1.0)),
            attention_factor=attention_factor,
        )


class _Rows:
    """Some of a tensor's rows, of each the groups of values that hold the columns asked for.

    `data` uint8 [rows, bytes] in the memory map; `columns` are those of what it decodes to;
    `order` as in `StoredMatrix`.
    """

    def __init__(
        self, tensor: GgufTensor, rows: slice, columns: slice, order: np.ndarray | None
    ) -> None:
        group, group_bytes = GGML_QUANT_SIZES[tensor.kind]
        first, end, _ = columns.indices(tensor.columns)
        first_group, end_group = first // group, -(-end // group)
        self.kind = tensor.kind
        self.data = tensor.data[rows, first_group * group_bytes : end_group * group_bytes]
        self.columns = slice(first - first_group * group, end - first_group * group)
        self.num_columns = end - first
        self.are_whole_groups = self.num_columns == (end_group - first_group) * group
        self.order = order


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def hugging_face_name(gguf_name: str) -> str | None:
    """`model.layers.0.mlp.up_proj.weight` for `blk.0.ffn_up.weight`; None for what is no weight."""
    stem, _, suffix = gguf_name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else None
