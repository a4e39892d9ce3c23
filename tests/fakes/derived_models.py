"""A GGUF model's weights in other formats: GGUF files of another type, a Hugging Face directory."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from engine_svc.compute.model.weights import open_source
from tests.fakes.float_weights import float_weights
from tokenizer_svc.tokenizer_source import load_tokenizer_files

_FILE_TYPES = {
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
    gguf.GGMLQuantizationType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    gguf.GGMLQuantizationType.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    gguf.GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}


def write_gguf_as(model: Path, target: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Copies a GGUF file, its matrices dequantised and stored anew as `kind`; returns `target`.

    Vectors stay as they are, and so does the order of rows.
    """
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        sub_type = field.types[-1] if is_array else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        data = tensor.data.view(np.ndarray)
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, np.array(data))
            continue
        values = gguf.quants.dequantize(data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_bfloat16_directory(model: Path, directory: Path) -> Path:
    """The model as a Hugging Face directory in bfloat16, tokenizer included; returns `directory`.

    For models of the Llama architecture without rope scaling.
    """
    config = open_source(model).config
    assert config.architecture == "LlamaForCausalLM"
    assert config.rope.kind == "default"
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.bfloat16() for name, tensor in float_weights(model).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    files = load_tokenizer_files(model)
    fields = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(files.eos_token_ids),
        "torch_dtype": str(torch.bfloat16).removeprefix("torch."),
    }
    _write_json(directory / "config.json", fields)
    _write_json(directory / "generation_config.json", {"eos_token_id": list(files.eos_token_ids)})
    files.tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": files.chat_templates.get("default"),
            **files.special_tokens,
        },
    )
    return directory


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
