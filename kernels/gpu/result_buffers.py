"""The memory that ops write results into: the same addresses in every step, as graphs need."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Gives memory of arbitrary contents for a purpose, a shape and a type: `ResultBuffers.scratch`.
Scratch = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


class ResultBuffers:
    """Buffers on one device, each as large as the largest step has asked for.

    A graph keeps the addresses that it was captured with. So the largest step is run once before
    any is captured: after `keep_addresses` what is outgrown stays in memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: dict[tuple[str, int, torch.dtype], _Pair] = {}
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}
        self._outgrown: list[Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """All that is held."""
        tensors = [buffer for pair in self._pairs.values() for buffer in pair.buffers]
        tensors += [*self._scratch.values(), *(self._outgrown or ())]
        return sum(tensor.nbytes for tensor in tensors)

    def keep_addresses(self) -> None:
        """To be called before the first capture."""
        if self._outgrown is None:
            self._outgrown = []

    def take(self, op: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width] of arbitrary contents, for a result of `op`.

        Two buffers take turns: the result lives until such a one was taken twice more.
        """
        key = (op, width, dtype)
        pair = self._pairs.get(key)
        if pair is None or len(pair.buffers[0]) < rows:
            if pair is not None:
                self._let_go(*pair.buffers)
            pair = self._pairs[key] = _Pair(
                [self._empty(rows, width, dtype=dtype) for _ in range(2)]
            )
        return pair.next()[:rows]

    def scratch(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`shape` of arbitrary contents, which live until `purpose` asks again."""
        size = math.prod(shape)
        buffer = self._scratch.get((purpose, dtype))
        if buffer is None or len(buffer) < size:
            if buffer is not None:
                self._let_go(buffer)
            buffer = self._scratch[purpose, dtype] = self._empty(size, dtype=dtype)
        return buffer[:size].view(shape)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def _let_go(self, *buffers: Tensor) -> None:
        if self._outgrown is not None:
            self._outgrown += buffers


class _Pair:
    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self._turn = 0

    def next(self) -> Tensor:
        self._turn = 1 - self._turn
        return self.buffers[self._turn]
