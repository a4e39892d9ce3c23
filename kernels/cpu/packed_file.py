"""The file that packed weights are kept in: how it is written, checked and mapped.

    header   magic, version, place and length of the table, SHA-256 of the table
    matrices each at a multiple of the pages' size, so that it can be mapped by itself
    table    JSON: what the weights are of, and the place of each matrix by its key

The table comes last, and nothing after it; the header is written when all else is on the disk. So a
file that was cut off, or written in part, has no table where its header says; what was changed
within the matrices is not noticed.
"""

import hashlib
import json
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"tl-packd"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQ32s")
_LINE_BYTES = 64
# Reads everything in at once: an engine that says it is ready answers its first request fast.
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)

# What weights are of: all of it has to agree for a file to be used.
Description = Mapping[str, str]


class UnusableFileError(Exception):
    """Why a file's weights are not those that are wanted, in a few words."""


class PackedFile:
    """A file of packed weights, mapped; pages are shared with all others that map it."""

    def __init__(self, path: Path, description: Description) -> None:
        """Raises UnusableFileError, and OSError where there is none that can be read."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            table = read_table(file.fileno())
            for name, wanted in description.items():
                if table["description"].get(name) != wanted:
                    raise UnusableFileError(f"it is of another {name}")
            content = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ
            )
        self._content = np.frombuffer(content, np.uint8)
        self._places = {key: (first, size) for key, first, size in table["matrices"]}

    @property
    def num_bytes(self) -> int:
        return len(self._content)

    def find(self, key: str, num_bytes: int) -> np.ndarray | None:
        """The matrix of this key and size, which cannot be written to."""
        first, size = self._places.get(key, (0, -1))
        return self._content[first : first + size] if size == num_bytes else None


def read_table(descriptor: int) -> dict[str, Any]:
    """The table of an open file, checked. Raises UnusableFileError."""
    status = os.fstat(descriptor)
    # Another user's file may hold anything, and may be cut off while it is mapped.
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        raise UnusableFileError("it is not a file of this user")
    head = os.pread(descriptor, _HEADER.size, 0)
    if len(head) < _HEADER.size:
        raise UnusableFileError("it is cut off")
    magic, version, first, size, digest = _HEADER.unpack(head)
    if (magic, version) != (_MAGIC, _VERSION):
        raise UnusableFileError("it is not a finished file of this version")
    if first + size != status.st_size:
        raise UnusableFileError("it is cut off")
    content = os.pread(descriptor, size, first)
    if hashlib.sha256(content).digest() != digest:
        raise UnusableFileError("its table is damaged")
    table: dict[str, Any] = json.loads(content)
    for _, start, length in table["matrices"]:
        if start < _HEADER.size or start % _LINE_BYTES or length < 0 or start + length > first:
            raise UnusableFileError("its table is damaged")
    return table


class PackedFileWriter:
    """Fills an open, empty file matrix by matrix, then finishes it. Methods raise OSError."""

    def __init__(self, descriptor: int, description: Description) -> None:
        self._descriptor = descriptor
        self._description = dict(description)
        self._places: dict[str, tuple[int, int]] = {}
        self._end = mmap.ALLOCATIONGRANULARITY

    def keep(self, key: str, matrix: np.ndarray) -> np.ndarray:
        """Writes a matrix, uint8 [bytes], and returns the same mapped from the file."""
        size, first = len(matrix), self._end
        self._write(matrix, first)
        self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._descriptor,
            size,
            flags=mmap.MAP_SHARED | _POPULATE,
            prot=mmap.PROT_READ,
            offset=first,
        )
        self._places[key] = (first, size)
        return np.frombuffer(mapped, np.uint8)

    def finish(self) -> None:
        """Writes table and header, and has everything on the disk before it returns."""
        matrices = [[key, first, size] for key, (first, size) in self._places.items()]
        table = json.dumps({"description": self._description, "matrices": matrices}).encode()
        self._write(table, self._end)
        os.fsync(self._descriptor)
        digest = hashlib.sha256(table).digest()
        self._write(_HEADER.pack(_MAGIC, _VERSION, self._end, len(table), digest), 0)
        os.fsync(self._descriptor)

    def _write(self, content: np.ndarray | bytes, offset: int) -> None:
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written


def descriptions(directory: Path, pattern: str) -> Iterator[tuple[Path, Description]]:
    """Of the files in `directory` that match: what each is of. Others are left out."""
    for path in directory.glob(pattern):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            try:
                yield path, read_table(file.fileno())["description"]
            except UnusableFileError:
                continue
