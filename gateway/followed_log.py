"""Brings a log up to what another gateway, or an earlier owner, has kept of the same run."""

import logging
from collections.abc import Sequence

from gateway.output_cut import Divider, num_events
from gateway.output_log import OutputLog
from gateway.run_batches import RunEnd, RunHead, read_batch

logger = logging.getLogger(__name__)


class FollowedLog:
    """Reads one kept log from its beginning, in batches; what `log` has already is left out.

    By the design's rule that the same request gives the same tokens, two logs of one run differ
    only in how far they have come.
    """

    def __init__(self, log: OutputLog) -> None:
        self.num_batches = 0
        self._log = log
        self._divider = Divider(log.num_events)
        self._was_empty = not log.size

    def take(self, batches: Sequence[bytes]) -> None:
        """The batches that follow those before. May end the log."""
        self.num_batches += len(batches)
        for batch in batches:
            part = read_batch(batch)
            if isinstance(part, RunHead):
                self._log.begin(part)
            elif isinstance(part, RunEnd):
                self._log.end(part.typed_error)
            else:
                for output in part:
                    new = self._divider.divide(output).new
                    if new is not None and (num_events(new) or self._was_empty):
                        self._log.append(new.sequence_id, new)
