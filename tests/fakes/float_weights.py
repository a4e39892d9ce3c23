"""A model's weights as float32 by Hugging Face names, read apart from the engine's own loader."""

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

_TOP_NAMES = {
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


def float_weights(model: Path) -> dict[str, Tensor]:
    """Of a GGUF file, dequantised by the gguf package, or of a directory's safetensors files."""
    return _of_gguf(model) if model.is_file() else _of_directory(model)


def hugging_face_name(gguf_name: str) -> str | None:
    """`model.layers.0.mlp.up_proj.weight` for `blk.0.ffn_up.weight`; None for what is no weight."""
    stem, _, suffix = gguf_name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"
    return f"{_TOP_NAMES[stem]}.{suffix}" if stem in _TOP_NAMES else None


def _of_directory(directory: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= {name: tensor.float() for name, tensor in load_file(path).items()}
    return weights


def _of_gguf(path: Path) -> dict[str, Tensor]:
    reader = gguf.GGUFReader(path)

    def value(key: str) -> object:
        field = reader.fields.get(key)
        return None if field is None else field.contents()

    # Only files of this architecture hold the halves of rotary pairs side by side.
    is_llama = value("general.architecture") == "llama"
    num_heads = value("llama.attention.head_count")
    heads = {"q_proj": num_heads, "k_proj": value("llama.attention.head_count_kv") or num_heads}
    weights = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        if name is None:
            continue
        data = tensor.data.view(np.ndarray)
        values = np.array(gguf.quants.dequantize(data, tensor.tensor_type), np.float32)
        part = name.split(".")[-2]
        if is_llama and part in heads:
            paired = values.reshape(heads[part], -1, 2, *values.shape[1:])
            values = np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
        weights[name] = torch.from_numpy(values)
    return weights
