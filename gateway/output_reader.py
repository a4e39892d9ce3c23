"""Reads a run's log for one client: merges what it lags behind, leaves out what it has."""

from collections.abc import Callable, Sequence
from typing import Final

from gateway.event_ids import id_line
from gateway.output_cut import Divider, num_events
from gateway.output_log import OutputLog
from gateway.usage import Usage
from protos.detok.v1 import detok_pb2
from protos.wire.stream_adapter import detok_adapter

_merge: Final = detok_adapter().merge


class OutputReader:
    """At most one output per choice at a time; `sequence_id` of each is its choice.

    had: per choice, how far the client has come. What it has goes to `on_had` and is not returned.
    covered: how far it has come with the outputs that `advance` was called for.
    """

    def __init__(
        self,
        log: OutputLog,
        had: Sequence[int] = (),
        on_had: Callable[[detok_pb2.Output], object] = lambda output: None,
    ) -> None:
        self.covered = list(had) or [0] * len(log.num_tokens)
        self._log = log
        self._divider = Divider(self.covered) if any(had) else None
        self._on_had = on_had
        self._position = 0
        # What has no token yet: nobody is told of it before the next token of its choice comes.
        self._held: dict[int, detok_pb2.Output] = {}
        # Choices whose end came without a token, and was merged with tokens before it.
        self._with_bare_end: set[int] = set()
        self._num_tokens = 0

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left to return, nor will be."""
        return self._log.ended and self._position >= self._log.size

    @property
    def usage(self) -> Usage:
        """The request's, with the tokens that were covered."""
        log = self._log
        num_prompt_tokens = log.head.num_prompt_tokens if log.head is not None else 0
        return Usage(num_prompt_tokens, log.num_cached_tokens, self._num_tokens)

    def id_line(self) -> bytes:
        """For the event of the output that was covered last."""
        return id_line(self.covered)

    def advance(self, output: detok_pb2.Output) -> None:
        """Covers an output that was returned."""
        index = output.sequence_id
        num_tokens = len(output.token_ids)
        self._num_tokens += num_tokens
        self.covered[index] += num_tokens or num_events(output)
        if self._with_bare_end and index in self._with_bare_end:
            self._with_bare_end.discard(index)
            self.covered[index] += 1

    async def next_outputs(self, timeout_seconds: float) -> Sequence[detok_pb2.Output]:
        """What came since the last call, merged per choice.

        Waits for the first; empty when none came within `timeout_seconds`, or at the end.
        """
        log = self._log
        has_waited = False
        while True:
            entries = log.entries(self._position)
            if not entries and not log.is_over:
                if has_waited:
                    return ()
                await log.change(timeout_seconds)
                has_waited = True
                continue
            self._position += len(entries)
            # By far the most common: one output, to be told as it is.
            if len(entries) == 1 and not self._held and not self._divider and entries[0].token_ids:
                return entries
            entries = self._new(entries)
            if entries or log.is_over:
                return entries
            has_waited = False

    def _new(self, entries: Sequence[detok_pb2.Output]) -> Sequence[detok_pb2.Output]:
        """What is new to the client and can be told, merged per choice."""
        merged, self._held = self._held, {}
        # Outputs that are ours; those of the log must not be changed.
        copied = set(merged)
        for entry in entries:
            new: detok_pb2.Output | None = entry
            if self._divider is not None:
                had, new = self._divider.divide(entry)
                if had is not None:
                    self._num_tokens += len(had.token_ids)
                    self._on_had(had)
            if new is None:
                continue
            index = new.sequence_id
            pending = merged.get(index)
            if pending is None:
                merged[index] = new
                continue
            if index not in copied:
                merged[index] = _copy(pending)
                copied.add(index)
            if new.HasField("finish") and not new.token_ids and pending.token_ids:
                self._with_bare_end.add(index)
            _merge(merged[index], new)
        if self._divider is not None and self._divider.is_done:
            self._divider = None
        self._held = {
            index: one if index in copied else _copy(one)
            for index, one in merged.items()
            if not num_events(one)
        }
        return [one for one in merged.values() if num_events(one)]


def _copy(output: detok_pb2.Output) -> detok_pb2.Output:
    made = detok_pb2.Output()
    made.CopyFrom(output)
    return made
