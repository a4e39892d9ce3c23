"""The GGUF metadata reader: every value type, and files that are damaged."""

import struct
from array import array
from pathlib import Path

import pytest
from gguf import GGUFWriter
from gguf.constants import GGUFValueType

from protos.wire.errors import StartupError
from tokenizer_svc.gguf_metadata import GgufMetadata, read_gguf_metadata


def written(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -100)
    writer.add_uint16("a.uint16", 60_000)
    writer.add_int16("a.int16", -30_000)
    writer.add_uint32("a.uint32", 4_000_000_000)
    writer.add_int32("a.int32", -2_000_000_000)
    writer.add_uint64("a.uint64", 1 << 63)
    writer.add_int64("a.int64", -(1 << 62))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "héllo 🦜")
    writer.add_array("a.strings", ["", "ñ", "Ġthe"])
    writer.add_array("a.numbers", [3, -1, 7])
    writer.add_key_value("a.flags", [True, False], GGUFValueType.ARRAY, sub_type=GGUFValueType.BOOL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_every_value_type_is_read(tmp_path: Path) -> None:
    values = read_gguf_metadata(written(tmp_path / "all.gguf"))
    assert values == {
        "general.architecture": "llama",
        "a.uint8": 200,
        "a.int8": -100,
        "a.uint16": 60_000,
        "a.int16": -30_000,
        "a.uint32": 4_000_000_000,
        "a.int32": -2_000_000_000,
        "a.uint64": 1 << 63,
        "a.int64": -(1 << 62),
        "a.float32": 0.5,
        "a.float64": 0.1,
        "a.bool": True,
        "a.string": "héllo 🦜",
        "a.strings": ["", "ñ", "Ġthe"],
        "a.numbers": array("i", [3, -1, 7]),
        "a.flags": [True, False],
    }


def test_a_file_cut_short_anywhere_is_a_startup_error(tmp_path: Path) -> None:
    whole = written(tmp_path / "all.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole) - 8):
        cut.write_bytes(whole[:length])
        with pytest.raises(StartupError):
            read_gguf_metadata(cut)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "not a usable GGUF file"),
        (b"PK\x03\x04 a zip file", "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99), "type 99"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 60),
            "cut short",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 60),
            "cut short",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q2sI", 2, b"\xff\xfe", 4),
            "not a usable GGUF file",
        ),
    ],
)
def test_what_is_wrong_with_a_damaged_file_is_said(
    tmp_path: Path, content: bytes, cause: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=cause):
        read_gguf_metadata(path)


def test_a_missing_file_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        read_gguf_metadata(tmp_path / "none.gguf")


def test_a_key_of_another_type_is_named() -> None:
    metadata = GgufMetadata({"tokenizer.ggml.tokens": "text"})
    with pytest.raises(StartupError, match=r"tokenizer\.ggml\.tokens"):
        metadata.texts("tokenizer.ggml.tokens")
    assert metadata.texts("tokenizer.ggml.merges") == []
    assert metadata.integer("general.file_type") is None
