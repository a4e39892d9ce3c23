"""A model's weights as float32 by HF's names, dequantised apart from the engine's own loader."""

from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine_svc.compute.model.gguf_file import hugging_face_name


def float_weights(model: Path) -> dict[str, Tensor]:
    """Of a GGUF file, dequantised by the gguf package, or of a directory's safetensors files."""
    return _of_gguf(model) if model.is_file() else _of_directory(model)


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
