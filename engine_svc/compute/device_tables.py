"""The batch's tables on the device: the tokens of each row, and its KV blocks.

Sampled tokens are appended on the device itself, so that a step can be queued before the host knows
the tokens of the one before it.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.ranges import ranges
from engine_svc.planning.step import StepPlan

# The block table begins at a multiple of as many words.
_ALIGNMENT = 16


class DeviceTables:
    """Rows [0, max_num_seqs), and the last one for padding, which always holds token 0 or a sampled
    one.

    Both tables lie in one piece of memory, so that one op writes all that a plan brings: `places`
    are those of int32 words in it.
    """

    def __init__(
        self, device: torch.device, max_num_seqs: int, max_model_len: int, max_blocks: int
    ) -> None:
        num_rows = max_num_seqs + 1
        # As on the host, a token more than a sequence has.
        self._row_tokens = max_model_len + 1
        self._row_blocks = max_blocks
        num_tokens = num_rows * self._row_tokens
        self._first_block = -(-num_tokens // _ALIGNMENT) * _ALIGNMENT
        num_words = self._first_block + num_rows * max_blocks
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._tokens = self._words[:num_tokens]
        self.token_table = self._tokens.view(num_rows, self._row_tokens)
        self.block_table = self._words[self._first_block :].view(num_rows, max_blocks)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self.padding_row = max_num_seqs

    def edits(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """What a plan changes: places int64 [e], and the words that go there, int32 [e]."""
        runs: list[tuple[int, Sequence[int]]] = []
        for start in plan.starts:
            runs.append((start.row * self._row_tokens, start.token_ids))
            self._num_blocks[start.row] = 0
            self._append_blocks(start.row, start.block_ids, runs)
        for step in plan.steps:
            if step.new_block_ids:
                self._append_blocks(step.row, step.new_block_ids, runs)
        firsts = np.array([first for first, _ in runs], np.int64)
        counts = np.array([len(words) for _, words in runs], np.int64)
        words = chain.from_iterable(words for _, words in runs)
        return ranges(firsts, counts), np.fromiter(words, np.int32, int(counts.sum()))

    def _append_blocks(
        self, row: int, block_ids: Sequence[int], runs: list[tuple[int, Sequence[int]]]
    ) -> None:
        first = self._first_block + row * self._row_blocks + int(self._num_blocks[row])
        runs.append((first, block_ids))
        self._num_blocks[row] += len(block_ids)

    def edit(self, places: Tensor, words: Tensor) -> None:
        """Applies `edits`, on the device."""
        self._words.index_copy_(0, places, words)

    def token_places(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where tokens lie, int64 [m]; of rows and positions [m]."""
        return rows * np.int64(self._row_tokens) + positions

    def take_tokens(self, places: Tensor, out: Tensor) -> None:
        """The tokens at `places` [m], into `out` int32 [m]."""
        torch.index_select(self._tokens, 0, places, out=out)

    def put_tokens(self, places: Tensor, token_ids: Tensor) -> None:
        """token_ids int32 [m] to `places` [m]."""
        self._tokens.index_copy_(0, places, token_ids)

    def tokens_of(self, rows: Tensor, longest: int) -> Tensor:
        """The first `longest` tokens of rows [m] -> int32 [m, longest]."""
        return self.token_table[:, :longest].index_select(0, rows)
