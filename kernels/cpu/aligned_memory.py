"""Memory for weights: aligned for vectors, and in large pages where the system has them."""

import mmap

import numpy as np

_ALIGNMENT = 64
_REGION_BYTES = 64 << 20


class AlignedMemory:
    """Cuts pieces from large regions, which live as long as one of their pieces does."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], zeros, at a multiple of 64 bytes."""
        padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if padded > len(self._free):
            self._free = map_region(max(padded, _REGION_BYTES))
        taken, self._free = self._free[:num_bytes], self._free[padded:]
        return taken


def map_region(num_bytes: int) -> np.ndarray:
    """Zeros, of which only what is written takes memory."""
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not every system has them.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)
