"""Tiny random models of each family the engine knows, as Hugging Face directories (TM)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.fakes.tiny_tokenizers import IM_END, IM_START, byte_level

VOCAB_SIZE = 258
# Logits of about this spread keep the likeliest token clear of the next one in nearly every step,
# so that greedy ids do not hang on rounding.
LOGIT_SPREAD = 4.0
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BASE_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "torch_dtype": "float32",
}


def write_tiny_llama(
    directory: Path, *, seed: int = 0, num_shards: int = 1, **config_overrides: Any
) -> Path:
    """Writes a two-layer Llama with the BL tokenizer to `directory`; returns `directory`.

    `config_overrides` are fields of config.json; the weights follow them (tied embeddings, biases,
    head sizes). The same seed and overrides give the same files.
    """
    family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return _write_model(directory, family | config_overrides, seed, num_shards)


def write_tiny_mistral(
    directory: Path, *, seed: int = 0, num_shards: int = 1, **config_overrides: Any
) -> Path:
    """As `write_tiny_llama`, with a sliding window of 24 tokens."""
    family = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 24,
    }
    return _write_model(directory, family | config_overrides, seed, num_shards)


def write_tiny_qwen2(
    directory: Path, *, seed: int = 0, num_shards: int = 1, **config_overrides: Any
) -> Path:
    """As `write_tiny_llama`, with biases on q, k and v, and tied embeddings."""
    family = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    }
    return _write_model(directory, family | config_overrides, seed, num_shards)


def write_tiny_qwen3(
    directory: Path, *, seed: int = 0, num_shards: int = 1, **config_overrides: Any
) -> Path:
    """As `write_tiny_llama`, with norms on q and k, and heads wider than hidden_size / heads."""
    family = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
        "head_dim": 32,
    }
    return _write_model(directory, family | config_overrides, seed, num_shards)


def _write_model(
    directory: Path, family_config: dict[str, Any], seed: int, num_shards: int
) -> Path:
    config = BASE_CONFIG | family_config
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"eos_token_id": IM_END, "pad_token_id": IM_END, "_from_model_config": True},
    )
    _write_weights(directory, random_weights(config, seed), num_shards)
    byte_level().save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(config))
    return directory


def _tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "added_tokens_decoder": {
            str(token_id): {
                "content": content,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token_id, content in ((IM_START, "<|im_start|>"), (IM_END, "<|im_end|>"))
        },
    }


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The tensors of a model with this config.json, float32, by their Hugging Face names."""
    generator = np.random.default_rng(seed)
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    query_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    is_qwen2 = config["model_type"] == "qwen2"
    qkv_bias = is_qwen2 or config.get("attention_bias", False)
    output_bias = config.get("attention_bias", False) and not is_qwen2
    mlp_bias = config.get("mlp_bias", False)
    weights: dict[str, np.ndarray] = {}

    def add_normal(name: str, shape: tuple[int, ...], spread: float, mean: float = 0.0) -> None:
        values = mean + spread * generator.standard_normal(shape)
        weights[name] = values.astype(np.float32)

    def add_linear(name: str, shape: tuple[int, int], bias: bool, gain: float = 1.0) -> None:
        add_normal(f"{name}.weight", shape, gain * shape[1] ** -0.5)
        if bias:
            add_normal(f"{name}.bias", (shape[0],), 0.2)

    add_normal("model.embed_tokens.weight", (config["vocab_size"], hidden), 1.0)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        add_normal(f"{layer}.input_layernorm.weight", (hidden,), 0.1, mean=1.0)
        # A gain on q and k makes attention pick out single tokens instead of averaging them all.
        add_linear(f"{layer}.self_attn.q_proj", (query_size, hidden), qkv_bias, gain=1.5)
        add_linear(f"{layer}.self_attn.k_proj", (kv_size, hidden), qkv_bias, gain=1.5)
        add_linear(f"{layer}.self_attn.v_proj", (kv_size, hidden), qkv_bias, gain=2.0)
        add_linear(f"{layer}.self_attn.o_proj", (hidden, query_size), output_bias, gain=2.0)
        if config["model_type"] == "qwen3":
            add_normal(f"{layer}.self_attn.q_norm.weight", (head_dim,), 0.1, mean=1.5)
            add_normal(f"{layer}.self_attn.k_norm.weight", (head_dim,), 0.1, mean=1.5)
        add_normal(f"{layer}.post_attention_layernorm.weight", (hidden,), 0.1, mean=1.0)
        add_linear(f"{layer}.mlp.gate_proj", (intermediate, hidden), mlp_bias, gain=2.0)
        add_linear(f"{layer}.mlp.up_proj", (intermediate, hidden), mlp_bias, gain=2.0)
        add_linear(f"{layer}.mlp.down_proj", (hidden, intermediate), mlp_bias, gain=2.0)
    add_normal("model.norm.weight", (hidden,), 0.1, mean=1.0)
    head_name = "lm_head.weight"
    if config["tie_word_embeddings"]:
        head_name = "model.embed_tokens.weight"
        # The residual stream starts as the embedding of the last token, so a tied head would
        # repeat it for ever: the last norm turns half of its directions round.
        weights["model.norm.weight"] *= generator.choice([-1.0, 1.0], hidden).astype(np.float32)
    else:
        add_normal(head_name, (config["vocab_size"], hidden), 1.0)
    weights[head_name] *= LOGIT_SPREAD * hidden**-0.5
    # Control tokens stay unlikely, so that a run does not end before a test has seen enough of it.
    if config["vocab_size"] > IM_END:
        weights[head_name][[IM_START, IM_END]] *= 0.1
    return weights


def _write_weights(directory: Path, weights: dict[str, np.ndarray], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        in_shard = {name: weights[name] for name in names[shard::num_shards]}
        save_file(in_shard, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(in_shard, file_name)
    total_size = sum(weight.nbytes for weight in weights.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total_size}, "weight_map": weight_map},
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
