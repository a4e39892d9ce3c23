"""A rank's share of a model: all shares make up the whole, and a rank reads only its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file

from engine_svc.compute.model import gguf_file
from engine_svc.compute.model.gguf_file import GgufFile
from engine_svc.compute.model.safetensors_files import SafetensorsFiles
from engine_svc.compute.model.sharded_source import ShardedSource, shard_of
from engine_svc.compute.model.weights import expected_shapes, load_weights, open_source
from kernels import StoredKind
from kernels.reference import ReferenceKernels
from protos.wire.errors import StartupError
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import BASE_CONFIG, random_weights, write_tiny_llama, write_tiny_qwen3

PARTED_BY_ROWS = ("embed_tokens", "lm_head", "q_proj", "gate_proj", "up_proj")
SHARED = ("k_proj", "v_proj")
PARTED_BY_COLUMNS = ("o_proj", "down_proj")
ALL_KINDS = frozenset(StoredKind)


def shards_of(path: Path, size: int) -> list[ShardedSource]:
    source = open_source(path)
    return [ShardedSource(source, rank, size) for rank in range(size)]


def joined(name: str, shards: list[torch.Tensor], num_kv_heads: int) -> torch.Tensor:
    """The whole tensor."""
    module = name.split(".")[-2]
    if module in PARTED_BY_ROWS:
        return torch.cat(shards)
    if module in SHARED:
        return torch.cat(shards[:: max(1, len(shards) // num_kv_heads)])
    if module in PARTED_BY_COLUMNS:
        return torch.cat(shards, dim=1) if shards[0].ndim == 2 else torch.stack(shards).sum(0)
    assert all(shard.equal(shards[0]) for shard in shards)
    return shards[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("write", "fields"),
    [
        (write_tiny_llama, {"attention_bias": True, "mlp_bias": True}),
        (write_tiny_llama, {"num_attention_heads": 8, "num_key_value_heads": 8}),
        (write_tiny_llama, {"num_key_value_heads": 1, "intermediate_size": 104}),
        (write_tiny_qwen3, {"tie_word_embeddings": True}),
    ],
)
def test_the_shares_of_all_ranks_make_up_the_whole(
    tmp_path: Path, size: int, write: Any, fields: Mapping[str, Any]
) -> None:
    path = write(tmp_path, **fields)
    whole = load_file(path / "model.safetensors")
    shards = shards_of(path, size)
    config = open_source(path).config
    for name, tensor in whole.items():
        parts = [shard.read(name) for shard in shards]
        assert joined(name, parts, config.num_kv_heads).equal(tensor), name
    for shard in shards:
        for name, shape in expected_shapes(shard.config).items():
            assert shard.shape(name) == tuple(shard.read(name).shape) == shape


def test_the_vocabulary_is_parted_at_whole_words_of_a_mask(tmp_path: Path) -> None:
    vocabs = [shard.vocab for shard in shards_of(write_tiny_llama(tmp_path), 4)]
    assert [(vocab.first, vocab.size) for vocab in vocabs] == [
        (0, 96),
        (96, 64),
        (160, 64),
        (224, 34),
    ]
    assert {vocab.whole_size for vocab in vocabs} == {258}


def test_one_rank_has_the_source_itself(tmp_path: Path) -> None:
    source = open_source(write_tiny_llama(tmp_path))
    assert shard_of(source, 0, 1) == (source, (0, 258, 258))


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 3, r"3 ranks .* 4 heads over 2 KV heads; --tensor-parallel may be 1, 2, 4$"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, r"may be 1, 3, 6$"),
        ({"vocab_size": 96}, 4, r"with 96 tokens and an MLP of 96: it is too small"),
    ],
)
def test_what_ranks_cannot_share_is_refused_in_one_line(
    tmp_path: Path, fields: Mapping[str, Any], size: int, message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        shards_of(write_tiny_llama(tmp_path, **fields), size)


def write_gguf(
    path: Path, kind: GGMLQuantizationType, family: str = "llama", **fields: Any
) -> dict[str, np.ndarray]:
    config = BASE_CONFIG | {"model_type": family, "attention_bias": True} | fields
    return write_tiny_gguf(path, config, random_weights(config, 3), kind)


@pytest.mark.parametrize(
    ("kind", "fields", "size"),
    [
        (GGMLQuantizationType.F16, {}, 4),
        (GGMLQuantizationType.Q8_0, {"intermediate_size": 96, "hidden_size": 64}, 2),
        (GGMLQuantizationType.Q4_0, {"intermediate_size": 256}, 4),
        # Groups of 256: those of o_proj's columns are more than a rank's heads.
        (GGMLQuantizationType.Q4_K, {"hidden_size": 256, "head_dim": 64}, 2),
    ],
)
def test_a_gguf_file_s_shares_make_up_the_whole_in_hugging_face_s_order(
    tmp_path: Path, kind: GGMLQuantizationType, fields: Mapping[str, Any], size: int
) -> None:
    if kind == GGMLQuantizationType.Q4_K:
        fields = {**fields, "intermediate_size": 768}
    whole = write_gguf(tmp_path / "model.gguf", kind, **fields)
    shards = shards_of(tmp_path / "model.gguf", size)
    for name, values in whole.items():
        parts = [shard.read(name) for shard in shards]
        assert joined(name, parts, 2).equal(torch.from_numpy(values)), name
        if values.ndim == 2:
            stored = [as_floats(shard, name, ALL_KINDS, kind) for shard in shards]
            assert joined(name, stored, 2).equal(torch.from_numpy(values)), name


def as_floats(
    source: ShardedSource, name: str, kinds: frozenset[StoredKind], kind: GGMLQuantizationType
) -> torch.Tensor:
    """What is stored, decoded as a backend would."""
    stored = source.stored(name, kinds)
    assert stored is not None
    data = np.ascontiguousarray(stored.data)
    values = stored.decode(data) if stored.decode else gguf_file.dequantize(data, kind)
    if stored.row_order is not None:
        values = values[stored.row_order]
    assert values.shape == (source.shape(name)[0], stored.columns)
    return torch.from_numpy(np.array(values))


def test_columns_are_parted_as_stored_where_their_groups_end(tmp_path: Path) -> None:
    fields = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 1280}
    write_gguf(tmp_path / "model.gguf", GGMLQuantizationType.Q4_K, **fields)
    shards = shards_of(tmp_path / "model.gguf", 2)
    # Five groups of 256 columns: three and two.
    assert [shard.config.intermediate_size for shard in shards] == [768, 512]
    for shard in shards:
        down = shard.stored("model.layers.0.mlp.down_proj.weight", ALL_KINDS)
        assert down is not None and down.kind == StoredKind.Q4_K and down.decode is None
        # Two heads are 128 columns, half a group.
        output = shard.stored("model.layers.0.self_attn.o_proj.weight", ALL_KINDS)
        assert output is not None and output.kind == StoredKind.F32 and output.columns == 128
        assert (
            shard.stored("model.layers.0.self_attn.o_proj.weight", ALL_KINDS - {StoredKind.F32})
            is None
        )


class CountingFile:
    """A safetensors file that counts what of it is handed out, and gives no whole matrix."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.num_values = 0

    def get_slice(self, name: str) -> Any:
        counting, stored = self, self._file.get_slice(name)

        class Slice:
            def get_dtype(self) -> str:
                return stored.get_dtype()

            def get_shape(self) -> list[int]:
                return stored.get_shape()

            def __getitem__(self, part: Any) -> torch.Tensor:
                tensor = stored[part]
                counting.num_values += tensor.numel()
                return tensor

        return Slice()


def test_a_rank_reads_only_its_part_of_safetensors(tmp_path: Path) -> None:
    files = SafetensorsFiles(write_tiny_llama(tmp_path, num_shards=2))
    counting = [CountingFile(file) for file in files._files.values()]
    files._files = dict(zip(files._files, counting, strict=True))
    for rank in range(4):
        before = sum(file.num_values for file in counting)
        source = ShardedSource(files, rank, 4)
        load_weights(source, ReferenceKernels(), torch.float32, report=lambda line: None)
        expected = sum(int(np.prod(shape)) for shape in expected_shapes(source.config).values())
        # `weight_bytes` looks at each matrix too, which reads nothing of the memory map.
        looked_at = sum(
            int(np.prod(shape))
            for shape in expected_shapes(source.config).values()
            if len(shape) == 2
        )
        num_values = sum(file.num_values for file in counting) - before
        assert num_values == expected + 2 * looked_at


def test_a_rank_decodes_only_its_part_of_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = GGMLQuantizationType.Q8_0
    write_gguf(tmp_path / "model.gguf", kind, head_dim=32, intermediate_size=128)
    source = ShardedSource(GgufFile(tmp_path / "model.gguf"), 1, 2)
    decoded = 0
    dequantize = gguf_file.dequantize

    def counting(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        nonlocal decoded
        group, group_bytes = GGML_QUANT_SIZES[kind]
        decoded += data.size // group_bytes * group
        return dequantize(data, kind)

    monkeypatch.setattr(gguf_file, "dequantize", counting)
    load_weights(source, ReferenceKernels(), torch.float32, report=lambda line: None)
    shapes = expected_shapes(source.config).values()
    assert decoded == sum(int(np.prod(shape)) for shape in shapes)
