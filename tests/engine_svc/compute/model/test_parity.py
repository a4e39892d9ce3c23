"""Logits of tiny models of every family equal transformers' within 1e-4."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_svc.compute.model.weights import open_source
from tests.fakes.decoding import SequenceLogits
from tests.fakes.tiny_models import (
    VOCAB_SIZE,
    write_tiny_llama,
    write_tiny_mistral,
    write_tiny_qwen2,
    write_tiny_qwen3,
)

TOLERANCE = 1e-4
LENGTH = 90
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (write_tiny_llama, {}),
    "llama, tied": (write_tiny_llama, {"tie_word_embeddings": True}),
    "llama, sharded": (write_tiny_llama, {"num_shards": 3}),
    "llama, biases": (write_tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": (write_tiny_llama, {"head_dim": 32}),
    "llama, as many KV heads": (write_tiny_llama, {"num_key_value_heads": 4}),
    "llama, one KV head": (write_tiny_llama, {"num_key_value_heads": 1}),
    "llama, three heads": (
        write_tiny_llama,
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    ),
    "llama, one layer": (write_tiny_llama, {"num_hidden_layers": 1}),
    "llama, linear rope": (write_tiny_llama, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama, dynamic rope": (write_tiny_llama, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama, llama3 rope": (write_tiny_llama, {"rope_scaling": LLAMA3_ROPE}),
    "llama, llama3 rope, new style": (
        write_tiny_llama,
        {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500_000.0}},
    ),
    "llama, yarn": (write_tiny_llama, {"rope_scaling": YARN}),
    "llama, yarn, given": (
        write_tiny_llama,
        {"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 16, "truncate": False}},
    ),
    "llama, yarn, mscale": (
        write_tiny_llama,
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "mistral": (write_tiny_mistral, {}),
    "mistral, no window": (write_tiny_mistral, {"sliding_window": None}),
    "qwen2": (write_tiny_qwen2, {}),
    "qwen2, untied": (write_tiny_qwen2, {"tie_word_embeddings": False}),
    "qwen2, half its layers slide": (
        write_tiny_qwen2,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": (write_tiny_qwen3, {}),
    "qwen3, tied, biases": (
        write_tiny_qwen3,
        {"tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3, some layers slide": (
        write_tiny_qwen3,
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize(("write", "overrides"), MODELS.values(), ids=MODELS.keys())
def test_logits_equal_transformers_on_prompts_chunks_and_decoded_tokens(
    tmp_path: Path, write: Callable[..., Path], overrides: dict[str, Any]
) -> None:
    directory = write(tmp_path, **overrides)
    token_ids = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
    model = SequenceLogits(open_source(directory))
    for chunks in ([LENGTH], [16, 1, 33, 40], [1, 2, 60, 27], [50] + [1] * 40):
        ends = torch.tensor(chunks).cumsum(0) - 1
        actual = model.after_chunks(token_ids.tolist(), chunks)
        assert float((actual - expected[ends]).abs().max()) < TOLERANCE
