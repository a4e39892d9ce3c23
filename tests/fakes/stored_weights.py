"""Weights as GGUF files hold them, of any kind, and what they stand for."""

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kernels import StoredKind, StoredMatrix
from tests.fakes.tiny_gguf import quantise

BLOCK_KINDS = (StoredKind.Q4_0, StoredKind.Q4_1, StoredKind.Q4_K, StoredKind.Q8_0)


def columns_for(kind: StoredKind, columns: int) -> int:
    """As many, rounded up to what the kind's blocks need."""
    return -(-columns // 256) * 256 if kind is StoredKind.Q4_K else columns


def random_stored(
    kind: StoredKind, rows: int, columns: int, seed: int = 0, is_reordered: bool = False
) -> tuple[StoredMatrix, Tensor]:
    """A matrix of such blocks, and the same dequantised, float32 [rows, columns]."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((rows, columns)).astype(np.float32)
    ggml_kind = GGMLQuantizationType[kind.name]
    data = quantise(values, ggml_kind)
    order = generator.permutation(rows) if is_reordered else None
    floats = torch.from_numpy(np.array(dequantize(data, ggml_kind), np.float32))
    if order is not None:
        floats = floats[torch.from_numpy(order)]
    return StoredMatrix(kind, data, columns, order), floats
