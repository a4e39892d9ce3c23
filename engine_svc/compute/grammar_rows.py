"""The grammars of the rows: each row's matcher, the masks of a step, and what its tokens complete.

All of a row's state follows from its grammar and its output ids, so a row that starts again, here
or on another engine, goes on as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher

from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.sampling_rows import TokenMask
from engine_svc.planning.step import Grammar, RowStart, SamplingError
from protos.wire.errors import InvalidRequest


@dataclass(slots=True)
class _GrammarRow:
    grammar: Grammar
    # Those of the request, as an index into a mask: words, and the bit in each.
    eos_words: np.ndarray
    eos_bits: np.ndarray
    eos_token_ids: frozenset[int]
    output_token_ids: list[int]
    # None once the grammar can be followed no further.
    matcher: LLMatcher | None


class GrammarRows:
    """Follows the grammar of each row that has one."""

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        self._compiler = compiler
        self._pool = LLExecutor(num_threads)
        self._rows: dict[int, _GrammarRow] = {}
        self._eos_words, self._eos_bits = _mask_places(compiler.eos_token_ids)

    def start(self, start: RowStart) -> None:
        """Takes over a row; its matcher is where the outputs so far lead."""
        self._rows.pop(start.row, None)
        grammar = start.sampling.grammar
        if grammar is None:
            return
        num_bits = self._compiler.num_mask_words * 32
        eos_token_ids = frozenset(i for i in start.sampling.eos_token_ids if i < num_bits)
        eos_words, eos_bits = _mask_places(sorted(eos_token_ids))
        outputs = list(start.token_ids[start.num_prompt_tokens :])
        row = _GrammarRow(grammar, eos_words, eos_bits, eos_token_ids, outputs, None)
        row.matcher = self._matcher_of(row)
        self._rows[start.row] = row

    def mask(self, rows: Sequence[int]) -> TokenMask | None:
        """Which tokens `rows` may sample next, for those that have a grammar.

        EOS may come exactly where a grammar may end. A row that can go on no further may sample
        nothing.
        """
        places = [place for place, row in enumerate(rows) if row in self._rows]
        if not places:
            return None
        allowed = np.zeros((len(places), self._compiler.num_mask_words), np.int32)
        chosen = [self._rows[rows[place]] for place in places]
        self._fill(chosen, allowed)
        for words, row in zip(allowed, chosen, strict=True):
            may_end = bool(np.any(words[self._eos_words] & self._eos_bits))
            # The library's EOS tokens are the model's, a request may know others, or none.
            np.bitwise_and.at(words, self._eos_words, ~self._eos_bits)
            if may_end:
                np.bitwise_or.at(words, row.eos_words, row.eos_bits)
        return TokenMask(torch.tensor(places), torch.from_numpy(allowed))

    def accept(
        self, rows: Sequence[int], token_ids: Sequence[int], errors: list[SamplingError | None]
    ) -> list[bool]:
        """Takes in what was sampled; says which rows' texts are complete, so that none may follow.

        Rows with an error are left out; that of a row whose grammar cannot be followed is set.
        """
        completed = [False] * len(rows)
        for place, row_index in enumerate(rows):
            row = self._rows.get(row_index)
            if row is None:
                continue
            if row.matcher is None:
                errors[place] = SamplingError.GRAMMAR_FAILED
            if errors[place] is None and token_ids[place] not in row.eos_token_ids:
                completed[place] = self._advance(row, token_ids[place])
        return completed

    def _fill(self, chosen: Sequence[_GrammarRow], allowed: np.ndarray) -> None:
        """Fills a mask per row, all at once; the library's threads hold no lock of Python's."""
        jobs = [(row.matcher, i) for i, row in enumerate(chosen) if row.matcher is not None]
        self._fill_jobs(jobs, allowed)
        again: list[tuple[Any, int]] = []
        for matcher, index in jobs:
            if matcher.is_error():
                row = chosen[index]
                row.matcher = self._restarted(row)
                allowed[index] = 0
                if row.matcher is not None:
                    again.append((row.matcher, index))
        self._fill_jobs(again, allowed)
        for matcher, index in again:
            if matcher.is_error():
                chosen[index].matcher = None
                allowed[index] = 0

    def _fill_jobs(self, jobs: list[tuple[Any, int]], allowed: np.ndarray) -> None:
        if jobs:
            num_rows, num_words = allowed.shape
            self._pool.unsafe_compute_mask_ptr(
                jobs, allowed.ctypes.data, num_words * allowed.itemsize, num_rows
            )

    def _advance(self, row: _GrammarRow, token_id: int) -> bool:
        """Whether the row's text is complete with this token."""
        assert row.matcher is not None
        row.output_token_ids.append(token_id)
        if not row.matcher.consume_token(token_id):
            row.matcher = self._restarted(row)
        return row.matcher is not None and bool(row.matcher.is_stopped())

    def _restarted(self, row: _GrammarRow) -> LLMatcher | None:
        """A new matcher for a row whose matcher failed.

        The lexer that copies of a matcher share grows with all that they have seen, and fails them
        all when it is full; a new one begins empty.
        """
        self._compiler.forget(row.grammar)
        return self._matcher_of(row)

    def _matcher_of(self, row: _GrammarRow) -> LLMatcher | None:
        try:
            matcher = self._compiler.matcher(row.grammar)
        except InvalidRequest:
            # Possible only where it was not checked: the error is told when the row is sampled.
            return None
        return matcher if matcher.consume_tokens(row.output_token_ids) else None


def _mask_places(token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(token_ids, np.int64)
    return ids // 32, (np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32)
