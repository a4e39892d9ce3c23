"""Weights as the native library reads them: rows as files hold them, packed into panels once."""

import ctypes
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.packed_weight import Format, PackedMatrix, PackedWeight
from kernels.cpu.weight_store import SMALLEST_FILE, MemoryStore, WeightStore, open_store
from kernels.stored_matrix import StoredKind, StoredMatrix

PANEL_ROWS = 16
# Values packed by one call: what of them is decoded before stays in a core's cache.
_CHUNK_VALUES = 1 << 19
_NO_ORDER = np.arange(0)


# TlSource.
_SOURCES = {
    StoredKind.F32: 0,
    StoredKind.F16: 1,
    StoredKind.BF16: 2,
    StoredKind.Q4_0: 3,
    StoredKind.Q4_1: 4,
    StoredKind.Q4_K: 5,
    StoredKind.Q8_0: 6,
}
_FLOATS = (StoredKind.F32, StoredKind.F16, StoredKind.BF16)
_INT8 = {StoredKind.Q8_0: Format.Q8} | dict.fromkeys(_FLOATS, Format.Q8)
# What each kind becomes. Kinds that are not named come decoded, as float32.
POLICIES: Mapping[str, Mapping[StoredKind, Format]] = {
    "auto": _INT8
    | {
        StoredKind.Q4_0: Format.Q4,
        StoredKind.Q4_1: Format.Q4,
        StoredKind.Q4_K: Format.Q4_WIDE,
    },
    "int8": _INT8,
    "bfloat16": dict.fromkeys(_FLOATS, Format.BF16),
    "float32": dict.fromkeys(_FLOATS, Format.F32),
}

# Packing these is no more than a copy, and they are many times as large as a quantised file.
_NOT_KEPT = {"float32"}


class WeightPacker:
    """Packs by one policy, on several threads. The memory of what it packed is its own, or that of
    a file inside of `kept_on_disk`; it lives as long as the packed matrices."""

    def __init__(self, library: ctypes.CDLL, policy: str, num_threads: int) -> None:
        self.library = library
        self._policy = policy
        self._formats = POLICIES[policy]
        # More would only wait for each other.
        self._num_threads = min(num_threads, os.cpu_count() or 1)
        self._store: WeightStore = MemoryStore()
        self._num_of_key: Counter[str] = Counter()

    @property
    def stored_kinds(self) -> frozenset[StoredKind]:
        """What `pack` takes as stored; anything else it is given as float32, or decodes."""
        return frozenset(self._formats)

    def packed_bytes(self, kind: StoredKind, rows: int, columns: int) -> int:
        """What a matrix of this kind takes once it is packed."""
        return int(self.library.tl_packed_bytes(self._formats[kind], rows, columns))

    def pack(
        self, parts: Sequence[Tensor | StoredMatrix], bias: Tensor | None = None
    ) -> PackedWeight:
        """The rows of all parts, one below the other; bias [rows]."""
        stored = [as_stored(part) for part in parts]
        matrices = tuple(self._pack_matrix(group) for group in self._groups(stored))
        return PackedWeight(matrices, None if bias is None else bias.float().contiguous())

    @contextmanager
    def kept_on_disk(
        self,
        model: Path,
        identity: str,
        num_bytes: int,
        report: Callable[[str], None],
        smallest_file: int = SMALLEST_FILE,
    ) -> Iterator[None]:
        """What is packed inside is looked up in a file beside `model`, or kept there for next time.

        `identity` changes when the model's files do; `num_bytes` is about what is packed in all,
        and less than `smallest_file` is not kept. `report` gets a line when a file is written, and
        why when there is none.
        """
        if self._policy in _NOT_KEPT:
            yield
            return
        description = {"identity": identity, "weights": self._policy, "layout": self.layout}
        own, self._store = (
            self._store,
            open_store(model, description, num_bytes, report, smallest_file),
        )
        self._num_of_key.clear()
        try:
            yield
        except BaseException:
            self._store.abandon()
            raise
        else:
            self._store.finish()
        finally:
            self._store = own

    @cached_property
    def layout(self) -> str:
        """A digest of what the library makes of a small matrix of each kind: it changes with the
        library's formats, and is the same for every instruction set."""
        digest = hashlib.sha256()
        # Bytes below 60 in no order: as float16, which the scales of blocks are, they are finite.
        numbers = np.arange((PANEL_ROWS + 1) * 1024, dtype=np.uint32) * 2654435761 >> 16
        data = (numbers % 60).astype(np.uint8).reshape(PANEL_ROWS + 1, 1024)
        for kind, target in self._formats.items():
            part = StoredMatrix(kind, data, _columns(kind, data.shape[1]))
            packed = np.zeros(self.packed_bytes(kind, len(data), part.columns), np.uint8)
            self._pack_rows(target, part, slice(0, len(data)), 0, len(data), packed)
            digest.update(packed)
        return digest.hexdigest()

    def _groups(self, parts: Sequence[StoredMatrix]) -> list[list[StoredMatrix]]:
        """Parts that follow each other in one matrix: each but the last fills its panels."""
        groups: list[list[StoredMatrix]] = []
        for part in parts:
            if (
                groups
                and self._formats[groups[-1][0].kind] == self._formats[part.kind]
                and len(groups[-1][-1].data) % PANEL_ROWS == 0
            ):
                groups[-1].append(part)
            else:
                groups.append([part])
        return groups

    def _pack_matrix(self, parts: Sequence[StoredMatrix]) -> PackedMatrix:
        target, columns = self._formats[parts[0].kind], parts[0].columns
        rows = sum(len(part.data) for part in parts)
        key = _key(target, parts)
        # Of matrices that look alike, the first is the first again at the next load.
        self._num_of_key[key] += 1
        piece = self._store.matrix(
            f"{key}.{self._num_of_key[key]}",
            int(self.library.tl_packed_bytes(target, rows, columns)),
            lambda data: self._fill(target, parts, rows, data),
        )
        return PackedMatrix(target, rows, columns, piece)

    def _fill(
        self, target: Format, parts: Sequence[StoredMatrix], rows: int, data: np.ndarray
    ) -> None:
        chunk = max(1, _CHUNK_VALUES // parts[0].columns // PANEL_ROWS) * PANEL_ROWS
        calls, first = [], 0
        for part in parts:
            num_rows = len(part.data)
            for start in range(0, num_rows, chunk):
                chosen = slice(start, min(start + chunk, num_rows))
                calls.append((target, part, chosen, first + start, rows, data))
            first += num_rows
        if len(calls) == 1 or self._num_threads == 1:
            for call in calls:
                self._pack_rows(*call)
            return
        with ThreadPoolExecutor(self._num_threads) as threads:
            for future in [threads.submit(self._pack_rows, *call) for call in calls]:
                future.result()

    def _pack_rows(
        self,
        target: Format,
        part: StoredMatrix,
        chosen: slice,
        first_row: int,
        rows: int,
        data: np.ndarray,
    ) -> None:
        """Rows `chosen` of a part become those from `first_row` on of the matrix in `data`."""
        order = part.row_order
        if order is not None:
            order = np.ascontiguousarray(order[chosen], np.int64)
        source = part.data
        if part.decode is not None:
            source = source[chosen] if order is None else source[order]
            source = np.ascontiguousarray(part.decode(source), np.float32)
            order = None
        elif order is None:
            source = source[chosen]
        status = self.library.tl_pack(
            *(target, _SOURCES[part.kind], source.ctypes.data, source.strides[0]),
            None if order is None else order.ctypes.data,
            *(first_row, chosen.stop - chosen.start, rows, part.columns, data.ctypes.data),
        )
        assert status == 0, f"{part.kind} does not go into {target.name}"


def as_stored(part: Tensor | StoredMatrix) -> StoredMatrix:
    """A float matrix as the rows of bytes that it is."""
    if isinstance(part, StoredMatrix):
        return part
    kinds = {torch.float16: StoredKind.F16, torch.bfloat16: StoredKind.BF16}
    kind = kinds.get(part.dtype, StoredKind.F32)
    values = part.contiguous() if part.dtype in kinds else part.float().contiguous()
    return StoredMatrix(kind, values.view(torch.uint8).numpy(), part.shape[1])


def _key(target: Format, parts: Sequence[StoredMatrix]) -> str:
    """Tells a matrix of a model from its others: by its shape, and by some of its rows."""
    digest = hashlib.sha256()
    for part in parts:
        last = len(part.data) - 1
        order = _NO_ORDER if part.row_order is None else part.row_order
        digest.update(f"{target.name} {part.kind} {part.data.shape} {part.columns} ".encode())
        digest.update(np.ascontiguousarray(order))
        for row in (0, last // 2, last):
            digest.update(np.ascontiguousarray(part.data[row]))
    return digest.hexdigest()


def _columns(kind: StoredKind, num_bytes: int) -> int:
    values, size = {
        StoredKind.F32: (1, 4),
        StoredKind.F16: (1, 2),
        StoredKind.BF16: (1, 2),
        StoredKind.Q4_0: (32, 18),
        StoredKind.Q4_1: (32, 20),
        StoredKind.Q4_K: (256, 144),
        StoredKind.Q8_0: (32, 34),
    }[kind]
    return num_bytes // size * values
