"""The rows of a weight as a file holds them, which some backends compute with as they are."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class StoredKind(StrEnum):
    """How a file holds the rows of a matrix; those with Q as GGUF files do."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q4_K = "q4_k"
    Q8_0 = "q8_0"


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The rows of a weight as a file holds them; they may lie in a memory map of it.

    With `decode`, `data` is of some other kind, and `decode` makes of some of its rows, uint8
    [n, bytes per row], rows of `kind`, which is then F32: float32 [n, columns].
    """

    kind: StoredKind
    data: np.ndarray  # uint8 [rows, bytes per row]
    columns: int
    row_order: np.ndarray | None = None  # int64 [rows]: row i is data[row_order[i]]
    decode: Callable[[np.ndarray], np.ndarray] | None = None
