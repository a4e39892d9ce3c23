"""Where packed weights lie: in memory of their own, or mapped from a file that is kept on disk.

Engines that start at once take turns: one writes the file, the others wait for it and map it, so
that all of them share its pages. The writer holds a lock on the unfinished file, which the kernel
frees when it ends, however it ends; what it leaves behind the next one writes over.
"""

import errno
import fcntl
import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernels.cpu.aligned_memory import AlignedMemory
from kernels.cpu.packed_file import (
    Description,
    PackedFile,
    UnusableFileError,
    descriptions,
    write_packed,
)

Report = Callable[[str], None]
Fill = Callable[[np.ndarray], None]
# Packing less than this takes no longer than looking for the file.
SMALLEST_FILE = 8 << 20
# What a disk keeps free besides the file.
_SPARE_BYTES = 32 << 20
# A writer that takes longer is stopped, or its disk hangs: one packs for oneself then.
_LONGEST_WAIT_SECONDS = 60.0
_WAIT_SECONDS = 0.02


@dataclass(slots=True)
class Piece:
    """Where a matrix lies: `data` uint8 [bytes] at a multiple of 64 bytes.

    It is another place, with the same contents, once its store is finished.
    """

    data: np.ndarray


class WeightStore(ABC):
    """Lends memory for weights that are packed one after the other, then `finish`."""

    @abstractmethod
    def matrix(self, key: str, num_bytes: int, fill: Fill) -> Piece:
        """A matrix that is kept by `key`, or else is made by `fill`, of so many bytes."""

    @abstractmethod
    def finish(self) -> None:
        """Everything is packed."""

    @abstractmethod
    def abandon(self) -> None:
        """Something went wrong: nothing of it is to be kept."""


class MemoryStore(WeightStore):
    """Keeps nothing for another time."""

    def __init__(self) -> None:
        self._memory = AlignedMemory()

    def matrix(self, key: str, num_bytes: int, fill: Fill) -> Piece:
        data = self._memory.take(num_bytes)
        fill(data)
        return Piece(data)

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class FileStore(WeightStore):
    """Lends the matrices of a finished file."""

    def __init__(self, path: Path, file: PackedFile, report: Report) -> None:
        self._path = path
        self._file = file
        self._report = report
        self._others = MemoryStore()
        self._lacks_some = False

    def matrix(self, key: str, num_bytes: int, fill: Fill) -> Piece:
        found = self._file.find(key, num_bytes)
        if found is not None:
            return Piece(found)
        self._lacks_some = True
        return self._others.matrix(key, num_bytes, fill)

    def finish(self) -> None:
        if self._lacks_some:
            self._report(f"{self._path} lacks some weights, so the next start writes it again")
            with suppress(OSError):
                self._path.unlink()

    def abandon(self) -> None:
        pass


class WritingStore(WeightStore):
    """Keeps weights in memory until all are there, then writes the file and maps it instead."""

    def __init__(
        self, path: Path, descriptor: int, description: Description, report: Report
    ) -> None:
        self._path = path
        self._descriptor = descriptor
        self._description = description
        self._report = report
        self._memory = MemoryStore()
        self._pieces: dict[str, Piece] = {}

    def matrix(self, key: str, num_bytes: int, fill: Fill) -> Piece:
        piece = self._memory.matrix(key, num_bytes, fill)
        self._pieces[key] = piece
        return piece

    def finish(self) -> None:
        try:
            matrices = {key: piece.data for key, piece in self._pieces.items()}
            write_packed(self._descriptor, self._description, matrices)
            _unfinished(self._path).replace(self._path)
        except OSError as error:
            self.abandon()
            self._report(f"packed weights are not kept in {self._path}: {error.strerror}")
            return
        os.close(self._descriptor)
        self._report(f"packed weights are kept in {self._path}")
        _remove_stale(self._path, self._description)
        file = _read(self._path, self._description, self._report)
        for key, piece in self._pieces.items():
            mapped = None if file is None else file.find(key, len(piece.data))
            piece.data = piece.data if mapped is None else mapped

    def abandon(self) -> None:
        _unlock(self._path, self._descriptor)


def open_store(
    model: Path,
    description: Description,
    num_bytes: int,
    report: Report,
    smallest_file: int = SMALLEST_FILE,
) -> WeightStore:
    """A store for all weights of the model at `model`, about `num_bytes` in all.

    The file lies beside the model, or in the user's cache directory where that cannot be written;
    it is used if it has this `description`, which holds the file's name as "weights". That there is
    no place for it is one line of `report`.
    """
    if num_bytes < smallest_file:
        return MemoryStore()
    paths = list(_paths(model, description["weights"]))
    for path in paths:
        file = _read(path, description, report)
        if file is not None:
            return FileStore(path, file, report)
    failure = ""
    for path in paths:
        try:
            descriptor = _lock(path)
            try:
                # Whoever held the lock before may have written it.
                file = _read(path, description, lambda line: None)
                if file is None:
                    _check_space(descriptor, num_bytes)
                    stored = {**description, "model": str(model.absolute())}
                    return WritingStore(path, descriptor, stored, report)
            except OSError:
                _unlock(path, descriptor)
                raise
            _unlock(path, descriptor)
            return FileStore(path, file, report)
        except OSError as error:
            failure = f"{path.parent}: {error.strerror}"
    report(f"packed weights are not kept on disk: {failure}")
    return MemoryStore()


def _paths(model: Path, weights: str) -> Iterator[Path]:
    """Where the file may lie, the best place first."""
    model = model.absolute()
    yield model.parent / f".{model.name}.tokenline-{weights}.packed"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    digest = hashlib.sha256(os.fsencode(model)).hexdigest()[:16]
    yield root / "tokenline" / "packed" / f"{model.name}.{digest}.tokenline-{weights}.packed"


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


def _read(path: Path, description: Description, report: Report) -> PackedFile | None:
    try:
        return PackedFile(path, description)
    except FileNotFoundError:
        return None
    except OSError as error:
        report(f"{path} is not used: {error.strerror}")
    except UnusableFileError as error:
        report(f"{path} is not used: {error}")
    return None


def _lock(path: Path) -> int:
    """The unfinished file for `path`, open, empty and locked. Raises OSError."""
    # Only the user's cache directory may not exist yet.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished, deadline = _unfinished(path), time.monotonic() + _LONGEST_WAIT_SECONDS
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o644)
        try:
            _wait_for_lock(descriptor, deadline)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(unfinished)):
                    os.ftruncate(descriptor, 0)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The writer that was waited for has finished it, or removed it.
        os.close(descriptor)


def _wait_for_lock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                message = "the engine that is writing it does not finish"
                raise OSError(errno.ETIMEDOUT, message) from None
            time.sleep(_WAIT_SECONDS)


def _unlock(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        _unfinished(path).unlink()
    os.close(descriptor)


def _check_space(descriptor: int, num_bytes: int) -> None:
    """OSError where the disk lacks the space, before it is full of a file that is of no use."""
    disk = os.fstatvfs(descriptor)
    if disk.f_bavail * disk.f_frsize < num_bytes + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _remove_stale(written: Path, description: Description) -> None:
    """Removes files beside `written`: of an earlier state of its model, and of models now gone."""
    for path, other in descriptions(written.parent, "*.tokenline-*.packed"):
        model = other.get("model", "")
        is_older = model == description["model"] and other["identity"] != description["identity"]
        if path != written and (is_older or not Path(model).exists()):
            with suppress(OSError):
                path.unlink()
