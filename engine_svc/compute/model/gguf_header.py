"""The head of a GGUF file: metadata, and where each tensor's bytes lie, without the vocabulary.

Format: version 2 and 3 of the GGUF specification (ggml, docs/gguf.md). The package `gguf` reads it
too, and makes an object of every token and merge on the way: most of a second for 49k tokens.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"},
    **{10: "<Q", 11: "<q", 12: "<d"},
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
# Longer ones say something about each token: they are for the tokenizer.
_MOST_NUMBERS = 4096


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as stored: `data` uint8 [rows, bytes per row] lies in the memory map."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # the usual order: rows first
    data: np.ndarray

    @property
    def columns(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Any]  # without arrays of texts, and long ones
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Maps a file and reads its head. Raises OSError, and ValueError where it is damaged."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(content)
    try:
        version, num_tensors, num_fields = _read_counts(content, cursor)
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version} of the format, and 2 or 3 can be read")
        metadata = dict(_read_fields(cursor, num_fields))
        infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment}, which is no power of two")
        start = -(-cursor.position // alignment) * alignment
        tensors = {info.name: info.locate(content, start) for info in infos}
    except (struct.error, IndexError, OverflowError):  # at, or far beyond, the end of the file
        raise ValueError("it ends in the middle of its header") from None
    if len(tensors) != num_tensors:
        raise ValueError("two of its tensors have one name")
    return GgufHeader(metadata, tensors)


class _Cursor:
    """Reads numbers and texts one after the other; struct.error or ValueError at the end."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.position = 4

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._content, self.position)
        self.position += struct.calcsize(form)
        return value

    def text(self) -> str:
        size = self.number("<Q")
        start = self.position
        self.skip(size)
        return self._content[start : self.position].decode("utf-8")

    def skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self._content):
            raise ValueError("it ends in the middle of its header")

    def skip_texts(self, count: int) -> None:
        # Written out: this runs for each token and each merge.
        unpack, content, position = struct.Struct("<Q").unpack_from, self._content, self.position
        for _ in range(count):
            position += 8 + unpack(content, position)[0]
        self.position = position
        self.skip(0)


def _read_counts(content: mmap.mmap, cursor: _Cursor) -> tuple[int, int, int]:
    if content[:4] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("<I")
    if version & 0xFFFF == 0:
        raise ValueError("it is written for machines of the other byte order")
    return version, cursor.number("<Q"), cursor.number("<Q")


def _read_fields(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    seen = set()
    for _ in range(count):
        name = cursor.text()
        if name in seen:
            raise ValueError(f"{name} comes twice in its metadata")
        seen.add(name)
        kind = cursor.number("<I")
        if kind == _ARRAY:
            numbers = _read_array(cursor)
            if numbers is not None:
                yield name, numbers
        elif kind == _STRING:
            yield name, cursor.text()
        else:
            yield name, cursor.number(_scalar(kind))


def _read_array(cursor: _Cursor) -> list[Any] | None:
    """A short array of numbers; another is skipped."""
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind == _STRING:
        cursor.skip_texts(count)
        return None
    if count <= _MOST_NUMBERS:
        return [cursor.number(_scalar(kind)) for _ in range(count)]
    cursor.skip(count * struct.calcsize(_scalar(kind)))
    return None


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"its metadata has a value of the unknown type {kind}")
    return _SCALARS[kind]


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    def locate(self, content: mmap.mmap, start: int) -> GgufTensor:
        block_values, block_bytes = GGML_QUANT_SIZES[self.kind]
        columns = self.shape[-1]
        if columns % block_values:
            raise ValueError(f"rows of {self.name} are no multiple of {block_values} values long")
        row_bytes = columns // block_values * block_bytes
        rows = math.prod(self.shape[:-1])
        first = start + self.offset
        if first + rows * row_bytes > len(content):
            raise ValueError(f"it ends before the end of {self.name}")
        data = np.frombuffer(content, np.uint8, rows * row_bytes, first).reshape(rows, row_bytes)
        return GgufTensor(self.name, self.kind, self.shape, data)


def _read_tensor_info(cursor: _Cursor) -> _TensorInfo:
    name, num_dimensions = cursor.text(), cursor.number("<I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(num_dimensions))[::-1]
    if 0 in shape:
        raise ValueError(f"{name} is empty")
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    try:
        return _TensorInfo(name, GGMLQuantizationType(kind), shape, offset)
    except ValueError:
        raise ValueError(f"{name} is of the unknown type {kind}") from None
