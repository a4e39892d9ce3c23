"""config.json: defaults, and what is refused, each with its cause in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine_svc.compute.model.config import read_hf_config
from protos.wire.errors import StartupError
from tests.fakes.tiny_models import write_tiny_llama, write_tiny_mistral, write_tiny_qwen2


def refusal(directory: Path) -> str:
    with pytest.raises(StartupError) as caught:
        read_hf_config(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_a_config_leaves_out_has_the_family_s_defaults(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings"):
        del fields[name]
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    config = read_hf_config(directory)
    assert config.head_dim == config.hidden_size // config.num_heads
    assert config.num_kv_heads == config.num_heads
    assert config.rope.theta == 10000.0
    assert not config.tie_word_embeddings


def test_sliding_windows_are_those_of_each_family(tmp_path: Path) -> None:
    assert read_hf_config(write_tiny_llama(tmp_path / "a")).sliding_windows == (0, 0)
    assert read_hf_config(write_tiny_mistral(tmp_path / "b")).sliding_windows == (24, 24)
    qwen2 = {"sliding_window": 8, "max_window_layers": 1}
    off = write_tiny_qwen2(tmp_path / "c", **qwen2)
    assert read_hf_config(off).sliding_windows == (0, 0)
    on = write_tiny_qwen2(tmp_path / "d", use_sliding_window=True, **qwen2)
    assert read_hf_config(on).sliding_windows == (0, 8)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["'MambaForCausalLM'", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": "mamba"}, ["'mamba'", "Qwen3ForCausalLM"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["'gptq'"]),
        ({"hidden_act": "gelu"}, ["'gelu'", "silu"]),
        ({"rope_scaling": {"type": "longrope"}}, ["'longrope'", "yarn"]),
        ({"num_key_value_heads": 3}, ["4 heads over 3 KV heads"]),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            ["layer_types names 1 layers of 2"],
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["part of a head"]),
    ],
)
def test_a_model_we_do_not_know_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], words: list[str]
) -> None:
    directory = write_tiny_llama(tmp_path)
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8")) | overrides
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    message = refusal(directory)
    assert all(word in message for word in words)


def test_unreadable_configs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert "No such file" in refusal(tmp_path)
    path.write_text("{", encoding="utf-8")
    assert "not valid JSON" in refusal(tmp_path)
    path.write_text("[]", encoding="utf-8")
    assert "JSON object" in refusal(tmp_path)
    path.write_text('{"architectures": ["LlamaForCausalLM"]}', encoding="utf-8")
    assert "lacks 'num_attention_heads'" in refusal(tmp_path)
    path.write_text(
        '{"architectures": ["LlamaForCausalLM"], "num_attention_heads": "four"}', encoding="utf-8"
    )
    assert "wrong kind" in refusal(tmp_path)
