"""Damaged models: whatever a header says, a load works or is refused in one line."""

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.compute.model.rotary import cos_sin_table
from engine_svc.compute.model.weights import load_weights, open_source
from kernels.reference import ReferenceKernels
from protos.wire.errors import StartupError
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import random_weights, write_tiny_llama

HOSTILE = (
    *(0, -1, 1, 3, 7, 2**31 - 1, 2**31, 2**63, -(2**63), 10**400, 0.5, 1e-320, 1e308),
    *(float("inf"), float("nan"), "4", "", None, True, [], [2, 2], {}, {"factor": 0}),
)
SIZES = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
)
FIELDS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "sliding_window", "layer_types"),
    *("quantization_config", "hidden_act", "max_window_layers", "tie_word_embeddings"),
)
ROPE_FIELDS = (
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "rope_theta"),
)


def load(model: Path) -> str:
    """The refusal of `model`, or nothing where it was loaded."""
    try:
        source = open_source(model)
        load_weights(source, ReferenceKernels(), torch.float32, lambda line: None)
        cos_sin_table(source.config.rope, source.config.head_dim, 4, None)
    except StartupError as error:
        assert str(error) and "\n" not in str(error)
        return str(error)
    return ""


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("gguf")
    hf = write_tiny_llama(directory)
    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    write_tiny_gguf(directory / "m.gguf", config, random_weights(config, seed=0))
    return (directory / "m.gguf").read_bytes()


@pytest.fixture(scope="module")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("hf"))


def with_size(content: bytes, key: str, value: int) -> bytes:
    name = f"llama.{key}".encode()
    at = content.index(name) + len(name)
    assert struct.unpack_from("<I", content, at) == (gguf.GGUFValueType.UINT32,)
    return content[: at + 4] + struct.pack("<I", value) + content[at + 8 :]


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, 2**31 - 1, 2**32 - 1])
def test_a_size_of_a_gguf_file_that_no_model_has_is_refused_by_name(
    tiny_gguf: bytes, tmp_path: Path, key: str, value: int
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_size(tiny_gguf, key, value))
    assert f"is {value}; expected is a number from 1 to" in load(path)


@settings(max_examples=60, deadline=None)
@given(field=st.sampled_from(FIELDS), value=st.sampled_from(HOSTILE) | st.integers(-5, 5000))
def test_any_value_in_config_json_loads_or_is_refused(
    tiny_hf: Path, field: str, value: Any
) -> None:
    load_with(tiny_hf, {field: value})


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["linear", "llama3", "yarn", "dynamic"]),
    fields=st.dictionaries(
        st.sampled_from(ROPE_FIELDS), st.sampled_from(HOSTILE) | st.floats(-2, 2), max_size=3
    ),
)
def test_any_rope_scaling_loads_or_is_refused(
    tiny_hf: Path, kind: str, fields: dict[str, Any]
) -> None:
    load_with(tiny_hf, {"rope_scaling": {"rope_type": kind, "factor": 2.0} | fields})


def load_with(hf: Path, changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        (copy / "model.safetensors").symlink_to(hf / "model.safetensors")
        fields = json.loads((hf / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps(fields | changes), encoding="utf-8")
        load(copy)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_any_damage_to_a_gguf_header_loads_or_is_refused(
    tiny_gguf: bytes, data: st.DataObject
) -> None:
    header = tiny_gguf.index(b"output_norm") + 4096
    damaged = bytearray(tiny_gguf)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(header, len(damaged) - 9)))
        value = data.draw(st.sampled_from([0, 1, 255, 2**31 - 1, 2**63 - 1]))
        width = 1 if value < 256 else 4 if value < 2**32 else 8
        damaged[at : at + width] = value.to_bytes(width, "little")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "m.gguf"
        path.write_bytes(damaged)
        load(path)


def test_factors_of_rotary_frequencies_of_another_shape_are_refused(
    tiny_hf: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_hf / "config.json").read_text(encoding="utf-8"))
    weights = random_weights(config, seed=0)
    for factors, words in (([1.0] * 3, "have shape"), ([1.0] * 7 + [0.0], "not positive")):
        path = tmp_path / "m.gguf"
        write_tiny_gguf(path, config, weights, rope_factors=torch.tensor(factors).numpy())
        assert words in load(path)
