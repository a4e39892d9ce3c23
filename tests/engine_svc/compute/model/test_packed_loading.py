"""Loading into the native library's form: every file type, mixed ones, and from the disk."""

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_svc.compute.model.weights import (
    DecoderWeights,
    WeightSource,
    identity,
    load_weights,
    open_source,
    weight_bytes,
)
from kernels import PackedEmbedding, PackedLinear, StoredKind, StoredMatrix
from kernels.cpu.library import load, runnable
from kernels.cpu.native_weights import WeightPacker
from kernels.cpu.packed_weight import Format, PackedWeight
from kernels.reference import ReferenceKernels
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import random_weights, write_tiny_llama

pytestmark = pytest.mark.skipif(not runnable(), reason="there is no library")
KINDS = [
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K"),
    *("Q5_0", "Q5_K", "Q6_K", "IQ4_NL"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
# Half a step of int8 and what float16 rounds of its scale, of the largest weight of all.
INT8_ERROR = 0.51 / 127 + 2**-11


class PackingKernels(ReferenceKernels):
    """Packs as the native kernels do, and counts what it packs."""

    def __init__(self, policy: str = "auto") -> None:
        super().__init__()
        self.library = load(runnable()[-1])
        self.packer = WeightPacker(self.library, policy, num_threads=2)
        self.stored_kinds = self.packer.stored_kinds

    def keep_packed(
        self, model: Path, identity: str, num_bytes: int, report: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        return self.packer.kept_on_disk(model, identity, num_bytes, report, smallest_file=0)

    def packed_bytes(self, kind: StoredKind, rows: int, columns: int) -> int:
        return self.packer.packed_bytes(kind, rows, columns)

    def pack_linear(
        self, parts: Sequence[Tensor | StoredMatrix], bias: Tensor | None = None
    ) -> PackedLinear:
        return self.packer.pack(parts, bias)

    def pack_embedding(self, part: Tensor | StoredMatrix) -> PackedEmbedding:
        return self.packer.pack([part])

    def tied_head(self, embedding: PackedEmbedding) -> PackedLinear:
        return embedding

    def unpack(self, weight: PackedWeight) -> Tensor:
        result = torch.empty(weight.rows, weight.columns)
        for first, matrix in weight.structures():
            self.library.tl_unpack(ctypes.byref(matrix), 0, matrix.rows, result[first:].data_ptr())
        return result


def load_packed(model: Path, kernels: PackingKernels) -> tuple[DecoderWeights, list[str]]:
    lines: list[str] = []
    weights = load_weights(open_source(model), kernels, torch.float32, lines.append)
    return weights, [line for line in lines if not line.startswith("loaded")]


def write_gguf(
    directory: Path, kind: GGMLQuantizationType | Callable[[str], GGMLQuantizationType], **config
) -> Path:
    hf = write_tiny_llama(directory / "hf", **(WIDE | config))
    fields = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    write_tiny_gguf(directory / "m.gguf", fields, random_weights(fields, seed=0), kind)
    return directory / "m.gguf"


def packed_and_read(
    weights: DecoderWeights, source: WeightSource
) -> list[tuple[PackedWeight, Tensor]]:
    """Each packed matrix beside the floats of the file."""

    def read(layer: int, *names: str) -> Tensor:
        return torch.cat([source.read(f"model.layers.{layer}.{name}.weight") for name in names])

    q, k, v = (f"self_attn.{name}_proj" for name in "qkv")
    first, last = weights.layers
    pairs = [
        (weights.embedding, source.read("model.embed_tokens.weight")),
        (weights.head, source.read("lm_head.weight")),
        (first.projections[0], read(0, q, k, v)),
        (last.projections[0], read(1, q)),
        (last.projections[1], read(1, k, v)),
    ]
    for index, layer in enumerate(weights.layers):
        pairs.append((layer.output, read(index, "self_attn.o_proj")))
        pairs.append((layer.gate_up, read(index, "mlp.gate_proj", "mlp.up_proj")))
        pairs.append((layer.down, read(index, "mlp.down_proj")))
    return pairs


def assert_loaded(model: Path, kernels: PackingKernels, error: float) -> DecoderWeights:
    weights, _ = load_packed(model, kernels)
    for packed, values in packed_and_read(weights, open_source(model)):
        difference = (kernels.unpack(packed) - values).abs().max()
        assert difference <= error * values.abs().max() + 1e-6
    return weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["auto", "int8", "bfloat16", "float32"])
def test_a_file_of_each_type_is_packed_as_its_dequantised_weights(
    tmp_path: Path, kind: str, policy: str
) -> None:
    model = write_gguf(tmp_path, GGMLQuantizationType[kind])
    kept = kind in ("Q4_0", "Q4_1", "Q4_K", "Q8_0") if policy == "auto" else kind == "Q8_0"
    errors = {"auto": INT8_ERROR, "int8": INT8_ERROR, "bfloat16": 2**-8, "float32": 0.0}
    error = 0.0 if kept and policy in ("auto", "int8") else errors[policy]
    assert_loaded(model, PackingKernels(policy), error)


def test_parts_of_a_mixed_file_are_matrices_of_their_own_types(tmp_path: Path) -> None:
    def kind(name: str) -> GGMLQuantizationType:
        if ".v_proj." in name or ".down_proj." in name or "embed_tokens" in name:
            return GGMLQuantizationType.Q6_K
        return GGMLQuantizationType.Q4_K

    kernels = PackingKernels()
    weights = assert_loaded(write_gguf(tmp_path, kind), kernels, INT8_ERROR)
    formats = [(m.format, m.rows) for m in weights.layers[0].projections[0].matrices]
    assert formats == [(Format.Q4_WIDE, 256 + 128), (Format.Q8, 128)]
    formats = [(m.format, m.rows) for m in weights.layers[0].gate_up.matrices]
    assert formats == [(Format.Q4_WIDE, 512)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_checkpoint_of_each_type_is_packed_as_int8(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = write_tiny_llama(tmp_path, attention_bias=True)
    path = directory / "model.safetensors"
    save_file({name: values.to(dtype) for name, values in load_file(path).items()}, path)
    weights = assert_loaded(directory, PackingKernels(), INT8_ERROR)
    bias = weights.layers[0].projections[0].bias
    assert bias is not None and bias.dtype == torch.float32 and len(bias) == 128


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    kernels = PackingKernels()
    model = write_gguf(tmp_path, GGMLQuantizationType.Q8_0, tie_word_embeddings=True)
    weights, _ = load_packed(model, kernels)
    assert weights.head is weights.embedding


def test_a_second_load_packs_nothing_and_a_changed_file_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_gguf(tmp_path, GGMLQuantizationType.Q6_K)
    first, lines = load_packed(model, PackingKernels())
    assert len(lines) == 1 and "are kept in" in lines[0]
    with monkeypatch.context() as patched:
        patched.setattr(WeightPacker, "_fill", lambda *arguments: pytest.fail("it was packed"))
        second, lines = load_packed(model, PackingKernels())
    assert lines == []
    for one, other in zip(
        packed_and_read(first, open_source(model)),
        packed_and_read(second, open_source(model)),
        strict=True,
    ):
        for matrix, same in zip(one[0].matrices, other[0].matrices, strict=True):
            assert np.array_equal(matrix.data, same.data)
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    _, lines = load_packed(model, PackingKernels())
    assert "is of another identity" in lines[0] and "are kept in" in lines[1]


def test_the_identity_is_that_of_all_files(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path, num_shards=2)
    seen = {identity(open_source(directory))}
    for path in open_source(directory).files:
        seen.add(identity(open_source(directory)))
        os.utime(path, ns=(0, 0))
    seen.add(identity(open_source(directory)))
    assert len(seen) == 1 + 3


@pytest.mark.parametrize("tied", [False, True])
def test_the_memory_is_known_before(tmp_path: Path, tied: bool) -> None:
    model = write_gguf(tmp_path, GGMLQuantizationType.Q4_1, tie_word_embeddings=tied)
    kernels, source = PackingKernels(), open_source(model)
    weights, _ = load_packed(model, kernels)
    packed = {id(weights.embedding): weights.embedding, id(weights.head): weights.head}
    norms = weights.norm.nbytes
    for layer in weights.layers:
        linears = (*layer.projections, layer.output, layer.gate_up, layer.down)
        packed |= {id(linear): linear for linear in linears}
        norms += layer.input_norm.nbytes + layer.post_attention_norm.nbytes
    total = sum(weight.num_bytes for weight in packed.values())
    assert weight_bytes(source, kernels, torch.float32) == total + norms
