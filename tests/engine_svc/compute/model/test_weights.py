"""Weights: stored types, shards, and what is missing or misshapen."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.compute.model.weights import (
    check_tensors,
    load_weights,
    open_source,
    weight_bytes,
)
from kernels import StoredKind
from kernels.reference import ReferenceKernels
from protos.wire.errors import StartupError
from tests.fakes.tiny_models import write_tiny_llama, write_tiny_qwen2


def rewrite(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of model.safetensors; None removes one. Names with _ for dots."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, tensor in tensors.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_any_stored_type_come_in_the_type_asked_for(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    directory = write_tiny_llama(tmp_path)
    original = load_file(directory / "model.safetensors")
    save_file({k: v.to(stored) for k, v in original.items()}, directory / "model.safetensors")
    lines: list[str] = []
    weights = load_weights(open_source(directory), ReferenceKernels(dtype), dtype, lines.append)
    expected = original["model.embed_tokens.weight"].to(stored).to(dtype)
    assert torch.equal(weights.embedding, expected)
    gate_up, _ = weights.layers[0].gate_up
    assert gate_up.dtype == dtype
    assert gate_up.shape == (2 * 96, 64)
    assert lines[-1] == "loaded 2 of 2 layers"


def test_fused_projections_hold_their_parts_in_order(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path, attention_bias=True)
    original = load_file(directory / "model.safetensors")
    weights = load_weights(
        open_source(directory), ReferenceKernels(), torch.float32, report=lambda line: None
    )
    prefix = "model.layers.0.self_attn"
    for kind, fused in zip(("weight", "bias"), weights.layers[0].projections[0], strict=True):
        parts = [original[f"{prefix}.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(fused, torch.cat(parts))
    query, key_value = weights.layers[-1].projections
    assert [len(query[0]), len(key_value[0])] == [64, 64]


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    rewrite(directory, **{"model.norm.weight": torch.ones(3)})
    with pytest.raises(StartupError, match=r"model\.norm\.weight has shape \[3\], and \[64\]"):
        check_tensors(open_source(directory))
    rewrite(directory, **{"model.norm.weight": None, "lm_head.weight": None})
    with pytest.raises(
        StartupError, match=r"lacks 2 tensors: model\.norm\.weight, lm_head\.weight$"
    ):
        check_tensors(open_source(directory))


def test_tensors_of_a_type_we_cannot_read_are_refused(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    rewrite(directory, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(StartupError, match=r"model\.norm\.weight, which is of type I8"):
        load_weights(
            open_source(directory), ReferenceKernels(), torch.float32, report=lambda line: None
        )


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path, num_shards=2)
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"short")
    with pytest.raises(StartupError, match=r"cannot read .*00002-of-00002"):
        open_source(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"cannot read .*00002-of-00002"):
        open_source(directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(StartupError, match="not a valid index"):
        open_source(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(StartupError, match=r"cannot read .*model\.safetensors"):
        open_source(directory)


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole = open_source(write_tiny_llama(tmp_path / "whole"))
    sharded = open_source(write_tiny_llama(tmp_path / "sharded", num_shards=3))
    assert whole.names == sharded.names
    assert all(np.array_equal(whole.read(name), sharded.read(name)) for name in whole.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matrices_are_handed_out_as_the_bytes_of_the_file(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    directory = write_tiny_llama(tmp_path)
    rewrite(directory, **{"lm_head.weight": torch.randn(258, 64, dtype=dtype)})
    source = open_source(directory)
    stored = source.stored("lm_head.weight", frozenset(StoredKind))
    assert stored is not None and stored.columns == 64 and stored.decode is None
    assert torch.from_numpy(stored.data.copy()).view(dtype).equal(source.read("lm_head.weight"))
    assert source.stored("lm_head.weight", {StoredKind.Q8_0}) is None
    assert source.files == [directory / "config.json", directory / "model.safetensors"]


def test_float64_is_decoded_when_it_is_packed(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    values = torch.randn(258, 64, dtype=torch.float64)
    rewrite(directory, **{"lm_head.weight": values})
    stored = open_source(directory).stored("lm_head.weight", frozenset(StoredKind))
    assert stored is not None and stored.kind == StoredKind.F32 and stored.decode is not None
    assert torch.from_numpy(stored.decode(stored.data[3:5])).equal(values[3:5].float())


def test_floats_take_what_the_file_holds_and_a_tied_head_once_more(tmp_path: Path) -> None:
    untied, tied = write_tiny_llama(tmp_path / "a"), write_tiny_qwen2(tmp_path / "b")
    for directory, extra in ((untied, 0), (tied, 258 * 64 * 4)):
        stored = sum(w.nbytes for w in load_file(directory / "model.safetensors").values())
        source, kernels = open_source(directory), ReferenceKernels()
        assert weight_bytes(source, kernels, torch.float32) == stored + extra
        assert 2 * weight_bytes(source, kernels, torch.bfloat16) == stored + extra
