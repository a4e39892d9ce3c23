"""Grammars with several ranks: rank 0 follows them and sends the others what they may sample."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.grammar_rows import GrammarRows
from engine_svc.compute.parallel_messages import SentMask
from engine_svc.compute.sampling_rows import TokenMask
from engine_svc.planning.step import RowStart, SamplingError


class SendingGrammarRows(GrammarRows):
    """Those of rank 0; `send` is called with each mask."""

    def __init__(
        self, compiler: GrammarCompiler, num_threads: int, send: Callable[[Any], None]
    ) -> None:
        super().__init__(compiler, num_threads)
        self._send = send

    def mask(self, rows: Sequence[int]) -> TokenMask | None:
        mask = super().mask(rows)
        if mask is not None:
            self._send(SentMask(*(part.numpy() for part in mask)))
        return mask


class ReceivingGrammarRows:
    """Those of another rank, which knows only which rows have a grammar. As `GrammarRows`.

    `receive` waits for what rank 0 sends next.
    """

    def __init__(self, receive: Callable[[], Any]) -> None:
        self._receive = receive
        self._rows: set[int] = set()

    def start(self, start: RowStart) -> None:
        self._rows.discard(start.row)
        if start.sampling.grammar is not None:
            self._rows.add(start.row)

    def mask(self, rows: Sequence[int]) -> TokenMask | None:
        if self._rows.isdisjoint(rows):
            return None
        mask = self._receive()
        assert isinstance(mask, SentMask), f"expected a mask, got {type(mask)}"
        return TokenMask(*map(torch.from_numpy, mask))

    def accept(
        self, rows: Sequence[int], token_ids: Sequence[int], errors: list[SamplingError | None]
    ) -> list[bool]:
        """Rank 0 alone says what came of a step."""
        return [False] * len(rows)
