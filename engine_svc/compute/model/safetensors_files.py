"""The safetensors files of a Hugging Face directory, one or several, as one source of weights."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_svc.compute.model.config import read_hf_config
from protos.wire.errors import StartupError

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_READABLE_TYPES = {"F64", "F32", "F16", "BF16"}


class SafetensorsFiles:
    """The weights of a directory, memory-mapped. A `WeightSource` (see weights.py)."""

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
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor in the type that it is stored in."""
        kind = self._slice(name).get_dtype()
        if kind not in _READABLE_TYPES:
            raise StartupError(f"{self.path}: cannot read {name}, which is of type {kind}")
        return self._files[self._file_of[name]].get_tensor(name)

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
