"""The safetensors files of a Hugging Face directory, one or several, as one source of weights."""

import json
from collections.abc import Set
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_svc.compute.model.config import read_hf_config
from engine_svc.compute.model.tensor_part import WHOLE, TensorPart
from kernels import StoredKind, StoredMatrix
from protos.wire.errors import StartupError

_SINGLE_FILE = "model.safetensors"
_CONFIG_FILE = "config.json"
_INDEX_FILE = "model.safetensors.index.json"
_READABLE_TYPES = {"F64", "F32", "F16", "BF16"}
_STORED_KINDS = {
    torch.float32: StoredKind.F32,
    torch.float16: StoredKind.F16,
    torch.bfloat16: StoredKind.BF16,
}


class SafetensorsFiles:
    """The weights of a directory, memory-mapped. `WeightFiles` (see weights.py)."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config = read_hf_config(directory)
        file_names = self._file_names()
        self._files = {name: _open(directory / name) for name in file_names}
        self._file_of = {
            tensor: name
            for name, file in self._files.items()
            for tensor in file.keys()  # noqa: SIM118, the file is no dict
        }

    @property
    def files(self) -> list[Path]:
        return [self.path / _CONFIG_FILE, *(self.path / name for name in self._files)]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def stored(
        self, name: str, kinds: Set[StoredKind], part: TensorPart = WHOLE
    ) -> StoredMatrix | None:
        """See `WeightSource`. What the library reads lies in its memory map."""
        tensor = self.read(name, part)
        rows = tensor.view(torch.uint8).numpy()
        kind = _STORED_KINDS.get(tensor.dtype)
        if kind in kinds:
            return StoredMatrix(kind, rows, tensor.shape[-1])
        if tensor.dtype == torch.float64 and StoredKind.F32 in kinds:
            return StoredMatrix(StoredKind.F32, rows, tensor.shape[-1], None, _narrow)
        return None

    def read(self, name: str, part: TensorPart = WHOLE) -> Tensor:
        """The tensor, or a part of it, in the type that it is stored in."""
        stored = self._slice(name)
        kind = stored.get_dtype()
        if kind not in _READABLE_TYPES:
            raise StartupError(f"{self.path}: cannot read {name}, which is of type {kind}")
        return stored[part.rows] if len(stored.get_shape()) == 1 else stored[part]

    def column_group(self, name: str) -> int:
        return 1

    def rope_frequency_factors(self) -> Tensor | None:
        return None

    def _slice(self, name: str):
        return self._files[self._file_of[name]].get_slice(name)

    def _file_names(self) -> list[str]:
        index = self.path / _INDEX_FILE
        if not index.exists():
            return [_SINGLE_FILE]
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except OSError as error:
            raise StartupError(f"cannot read {index}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(f"{index} is not a valid index of shards") from error


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error


def _narrow(rows: np.ndarray) -> np.ndarray:
    """Bytes of float64 to float32."""
    return rows.view(np.float64).astype(np.float32)
