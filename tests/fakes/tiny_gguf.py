"""Writes tiny models as GGUF files in any quantisation, from weights under Hugging Face's names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

# The half-precision scales of a block's bytes, of the kinds that the package reads but cannot
# write: random bytes are a valid block once these are small numbers.
_SCALE_OFFSETS = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.IQ4_NL: (0,),
    GGMLQuantizationType.IQ4_XS: (0,),
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_tiny_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    kind: GGMLQuantizationType | Callable[[str], GGMLQuantizationType] = GGMLQuantizationType.F32,
    metadata: Mapping[str, float | str] | None = None,
    rope_factors: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Writes a model with this config.json and these weights; matrices are stored as `kind`,
    or as it says of each by its name.

    Returns the weights that the file really holds, dequantised, under the same names. `metadata`
    are further keys, without the architecture's prefix.
    """
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{family}.{key}", value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    stored = {
        name: _add(writer, config, name, values, kind(name) if callable(kind) else kind)
        for name, values in weights.items()
    }
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add(
    writer: gguf.GGUFWriter,
    config: Mapping[str, Any],
    name: str,
    values: np.ndarray,
    kind: GGMLQuantizationType,
) -> np.ndarray:
    num_heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    is_permuted = config["model_type"] == "llama" and num_heads is not None
    order = np.arange(len(values))
    if is_permuted:
        # llama.cpp's converter: the halves of a head become neighbours, row by row.
        order = order.reshape(num_heads, 2, -1).swapaxes(1, 2).ravel()
    if values.ndim == 1:
        kind = GGMLQuantizationType.F32
    raw = quantise(values[order], kind)
    writer.add_tensor(_gguf_name(name), raw, raw_dtype=kind)
    stored = np.empty_like(values)
    stored[order] = gguf.quants.dequantize(raw, kind)
    return stored


def quantise(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The bytes of `values` [rows, columns] as `kind`; random ones where none can be computed."""
    if kind not in _SCALE_OFFSETS:
        return gguf.quants.quantize(values, kind)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks_per_row = values.shape[1] // block_values
    generator = np.random.default_rng(values.size)
    blocks = generator.integers(0, 256, (len(values), blocks_per_row, block_bytes), np.uint8)
    for offset in _SCALE_OFFSETS[kind]:
        scales = generator.uniform(1e-4, 4e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(len(values), -1)


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{suffix}"
