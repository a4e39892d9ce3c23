"""GGUF models: every quantisation, the rotary permutation, rope scaling, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import save_file

from engine_svc.compute.model.gguf_file import GgufFile
from engine_svc.compute.model.gguf_header import read_gguf
from engine_svc.compute.model.weights import expected_shapes, open_source
from kernels import StoredKind, StoredMatrix
from protos.wire.errors import StartupError
from tests.fakes.decoding import SequenceLogits
from tests.fakes.gguf_files import write_gguf
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import (
    BASE_CONFIG,
    random_weights,
    write_tiny_llama,
    write_tiny_qwen2,
    write_tiny_qwen3,
)

KINDS = [
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
    GGMLQuantizationType.IQ4_NL,
    GGMLQuantizationType.IQ4_XS,
]
WRITERS = {"llama": write_tiny_llama, "qwen2": write_tiny_qwen2, "qwen3": write_tiny_qwen3}
# K-quantised blocks hold 256 values.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
TOKENS = [3, 200, 17, 99, 4, 250, 31, 31, 80, 5]


def gguf_and_hf(
    directory: Path,
    family: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, float | str] | None = None,
    rope_factors: np.ndarray | None = None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """The same tiny model as a GGUF file, and as an HF directory of what that file holds."""
    # A norm's epsilon that float32, and so GGUF, holds exactly.
    hf = WRITERS[family](directory / "hf", **({"rms_norm_eps": 2.0**-17} | overrides))
    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    path = directory / "tiny.gguf"
    weights = random_weights(config, seed=0)
    stored = write_tiny_gguf(path, config, weights, kind, metadata, rope_factors)
    save_file(stored, hf / "model.safetensors")
    return path, hf


def assert_same_logits(first: Path, second: Path) -> None:
    logits = [
        SequenceLogits(open_source(path)).after_chunks(TOKENS, [7, 1, 1, 1])
        for path in (first, second)
    ]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_quantised_file_is_the_model_of_its_dequantised_weights(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    path, hf = gguf_and_hf(tmp_path, "llama", kind, **WIDE)
    source, expected = open_source(path), open_source(hf)
    assert source.names == expected.names
    for name in expected_shapes(source.config):
        assert source.shape(name) == expected.shape(name)
        assert torch.equal(source.read(name), expected.read(name)), name
    assert_same_logits(path, hf)


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_each_family_is_the_hf_model(tmp_path: Path, family: str, tied: bool) -> None:
    path, hf = gguf_and_hf(tmp_path, family, tie_word_embeddings=tied)
    assert GgufFile(path).config == open_source(hf).config
    assert_same_logits(path, hf)


def test_biases_of_a_llama_file_are_found_and_permuted_back(tmp_path: Path) -> None:
    path, hf = gguf_and_hf(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert GgufFile(path).config == open_source(hf).config
    assert_same_logits(path, hf)


def test_rope_factors_of_a_llama_3_file_are_its_hf_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    dims = np.arange(0, BASE_CONFIG["head_dim"], 2) / BASE_CONFIG["head_dim"]
    wavelengths = 2 * np.pi * BASE_CONFIG["rope_theta"] ** dims
    smooth = np.clip((64 / wavelengths - 1.0) / (4.0 - 1.0), 0, 1)
    factors = 1 / ((1 - smooth) / 8.0 + smooth)
    path, hf = gguf_and_hf(tmp_path, "llama", rope_factors=factors, rope_scaling=scaling)
    assert_same_logits(path, hf)


@pytest.mark.parametrize(
    ("metadata", "rope_scaling"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
    ids=["linear", "linear, old key", "yarn"],
)
def test_rope_scaling_in_the_metadata_is_that_of_config_json(
    tmp_path: Path, metadata: dict[str, float | str], rope_scaling: dict[str, Any]
) -> None:
    path, hf = gguf_and_hf(tmp_path, "qwen2", metadata=metadata, rope_scaling=rope_scaling)
    assert_same_logits(path, hf)


def test_a_sliding_window_in_the_metadata_is_kept(tmp_path: Path) -> None:
    path, _ = gguf_and_hf(tmp_path, "llama", metadata={"attention.sliding_window": 24.0})
    assert GgufFile(path).config.sliding_windows == (24, 24)


def rows_of(part: StoredMatrix) -> torch.Tensor:
    """What the kernels make of a stored matrix."""
    data = part.data if part.row_order is None else part.data[part.row_order]
    decode = part.decode or partial(dequantize, qtype=GGMLQuantizationType[part.kind.name])
    return torch.from_numpy(np.array(decode(data)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_matrices_are_handed_out_as_stored_or_to_be_decoded(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    path, _ = gguf_and_hf(tmp_path, "llama", kind, **WIDE)
    source = open_source(path)
    for name in ("model.embed_tokens", *(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")):
        name = f"{name}.weight"
        stored = source.stored(name, frozenset(StoredKind))
        assert stored is not None
        is_known = kind.name in StoredKind.__members__
        assert stored.kind.name == (kind.name if is_known else "F32")
        assert (stored.decode is None) == is_known
        assert not stored.data.flags.owndata, "it is a view of the file"
        decoded = source.stored(name, {StoredKind.F32})
        assert decoded is not None and decoded.kind == StoredKind.F32
        for part in (stored, decoded):
            assert torch.equal(rows_of(part), source.read(name))
        assert is_known or source.stored(name, {StoredKind.Q8_0}) is None


def test_the_header_is_read_as_the_package_does(tmp_path: Path) -> None:
    tiny, _ = gguf_and_hf(tmp_path, "llama", rope_factors=np.ones(8))
    tokens = [f"token {i}" for i in range(5000)]
    vocabulary = write_gguf(
        tmp_path / "vocabulary.gguf",
        model="llama",
        tokens=tokens,
        types=[1] * 5000,
        scores=[0.5] * 5000,
        extra={"some.flag": True, "some.number": 7, "some.text": "ü"},
    )
    for path in (tiny, vocabulary):
        header, expected = read_gguf(path), gguf.GGUFReader(path)
        for key, value in header.metadata.items():
            assert value == expected.fields[key].contents(), key
        for key in expected.fields.keys() - header.metadata.keys():
            assert key.startswith(("GGUF.", "tokenizer.ggml.")), key
        assert list(header.tensors) == [tensor.name for tensor in expected.tensors]
        for tensor in expected.tensors:
            ours = header.tensors[tensor.name]
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert ours.kind == tensor.tensor_type
            assert ours.data.tobytes() == tensor.data.tobytes()


def test_files_that_cannot_be_served_are_refused_in_one_line(tmp_path: Path) -> None:
    not_gguf = tmp_path / "not.gguf"
    not_gguf.write_bytes(b"GG")
    with pytest.raises(StartupError, match=r"not\.gguf is not a readable GGUF"):
        open_source(not_gguf)
    with pytest.raises(StartupError, match="there is no model at"):
        open_source(tmp_path / "absent.gguf")
    unknown = tmp_path / "unknown.gguf"
    writer = gguf.GGUFWriter(unknown, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StartupError, match="'mamba'; known are llama, qwen2, qwen3"):
        open_source(unknown)
    experts, _ = gguf_and_hf(tmp_path, "llama", metadata={"expert_count": 8.0})
    with pytest.raises(StartupError, match="mixtures of experts"):
        open_source(experts)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path, _ = gguf_and_hf(tmp_path, "llama")
    content = path.read_bytes()
    for size in (10, 100, 1000, len(content) // 2):
        path.write_bytes(content[:size])
        with pytest.raises(StartupError, match="not a readable GGUF file"):
            open_source(path)
