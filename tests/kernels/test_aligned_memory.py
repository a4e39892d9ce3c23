"""Memory for weights: aligned, separate, and no more than is asked for."""

import numpy as np

from kernels.cpu.aligned_memory import AlignedMemory, map_region


def test_pieces_are_aligned_zero_and_apart() -> None:
    memory = AlignedMemory()
    sizes = [1, 64, 65, 100_000, 80 << 20, 3]
    pieces = [memory.take(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    assert all(piece.ctypes.data % 64 == 0 for piece in pieces)
    assert not any(piece[:1000].any() for piece in pieces)
    for value, piece in enumerate(pieces, start=1):
        piece[:] = value
    for value, piece in enumerate(pieces, start=1):
        assert (piece == value).all()


def test_small_pieces_share_a_region() -> None:
    memory = AlignedMemory()
    first, second = memory.take(100), memory.take(100)
    assert second.ctypes.data - first.ctypes.data == 128


def test_a_region_outlives_the_memory_that_it_came_from() -> None:
    piece = AlignedMemory().take(1000)
    piece[:] = 7
    assert np.array_equal(piece, np.full(1000, 7))
    assert map_region(4096).flags.writeable
