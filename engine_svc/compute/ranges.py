"""Ranges of integers laid end to end: how a batch's sequences are listed token by token."""

import numpy as np


def ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[first, first + count) for each of both int64 [k], laid end to end."""
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(firsts - ends + counts, counts)
