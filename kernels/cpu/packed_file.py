"""The file that packed weights are kept in: how it is written, checked and mapped.

    header   magic, version, place and length of the table, SHA-256 of the table
    matrices each at a multiple of 64 bytes
    table    JSON: what the weights are of, and the place and CRC-32 of each matrix by its key

The table comes last, and nothing after it; the header is written when all else is on the disk. So a
file that was cut off, or written in part, has no table where its header says. Reading the matrices
in, which a first request would wait for, checks them too.
"""

import hashlib
import json
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kernels.cpu.aligned_memory import map_region

_MAGIC = b"tl-packd"
_VERSION = 2
_HEADER = struct.Struct("<8sQQQ32s")
_LINE_BYTES = 64
# Written at once. What is written, or read in, by the large page lies in large pages, where the
# system and its file system have them (Linux 6.16 with ext4 or XFS): reading the weights is 13 %
# faster than from pages of 4 KiB, as fast as from large pages of the process's own.
_BLOCK_BYTES = 32 << 20

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
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                content.madvise(mmap.MADV_HUGEPAGE)
        self._content = np.frombuffer(content, np.uint8)
        self._places = {key: (first, size) for key, first, size, _ in table["matrices"]}
        self._read_in([checksum for *_, checksum in table["matrices"]])

    def _read_in(self, checksums: Sequence[int]) -> None:
        """So that an engine that says it is ready answers its first request fast."""

        def checksum_of(place: tuple[int, int]) -> int:
            first, size = place
            return zlib.crc32(self._content[first : first + size])

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            if list(threads.map(checksum_of, self._places.values())) != list(checksums):
                raise UnusableFileError("its weights are damaged")

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
    try:
        return _checked(json.loads(content), first)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise UnusableFileError("its table is damaged") from None


def _checked(table: dict[str, Any], end: int) -> dict[str, Any]:
    """A table of matrices that end before `end`."""
    for key, *numbers in table["matrices"]:
        start, size, _ = numbers
        is_place = isinstance(key, str) and all(isinstance(number, int) for number in numbers)
        is_inside = _HEADER.size <= start <= start + size <= end
        if not is_place or not is_inside or start % _LINE_BYTES:
            raise ValueError(f"{key} cannot lie at {start}")
    description = {str(name): str(value) for name, value in table["description"].items()}
    return {"description": description, "matrices": table["matrices"]}


def write_packed(
    descriptor: int, description: Description, matrices: Mapping[str, np.ndarray]
) -> None:
    """Fills an open, empty file; all is on the disk before it returns. Raises OSError."""
    places, end = [], _LINE_BYTES
    for key, matrix in matrices.items():
        places.append((key, end, len(matrix), zlib.crc32(matrix)))
        end += -(-len(matrix) // _LINE_BYTES) * _LINE_BYTES
    block, start = map_region(_BLOCK_BYTES), 0
    for (_, first, size, _), matrix in zip(places, matrices.values(), strict=True):
        done = 0
        while done < size:
            if first + done >= start + _BLOCK_BYTES:
                _write(descriptor, block, start)
                start += _BLOCK_BYTES
            at = first + done - start
            part = matrix[done : done + _BLOCK_BYTES - at]
            block[at : at + len(part)] = part
            done += len(part)
    _write(descriptor, block[: end - start], start)
    table = json.dumps({"description": dict(description), "matrices": places}).encode()
    _write(descriptor, table, end)
    os.fsync(descriptor)
    digest = hashlib.sha256(table).digest()
    _write(descriptor, _HEADER.pack(_MAGIC, _VERSION, end, len(table), digest), 0)
    os.fsync(descriptor)


def _write(descriptor: int, content: np.ndarray | bytes, offset: int) -> None:
    rest = memoryview(content)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
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
