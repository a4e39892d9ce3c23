"""One request in progress: moves its record through the stages, measures, can be cancelled."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from gateway.metrics import Metrics
from gateway.records import RequestRecord, Stage
from protos.wire.errors import RequestCancelled, RequestTimeout, TokenlineError

_ORDER: Final = {stage: order for order, stage in enumerate(Stage)}


class LiveRequest:
    """Owner of `record` from admission to finish. `save` is told whenever the record has moved."""

    def __init__(
        self, record: RequestRecord, metrics: Metrics, save: Callable[[RequestRecord], None]
    ) -> None:
        self.record = record
        self.cancel_requested = False
        self._metrics = metrics
        self._save = save
        self.timed_out = False
        self._on_cancel: Callable[[], None] | None = None
        self._on_timeout: Callable[[], None] | None = None
        # Unix time of the start, advanced by the monotonic clock: stages never go backwards.
        self._started_at = time.time()
        self._started = time.monotonic()
        if record.preprocessing_at is None:
            record.preprocessing_at = self._started_at
        save(record)

    def resume(self, num_output_tokens: int, num_cached_tokens: int) -> None:
        """What the request had when it was taken over, if it was; counted where it was made."""
        self.record.num_output_tokens = num_output_tokens
        self.record.num_cached_tokens = num_cached_tokens

    @property
    def id(self) -> str:
        return self.record.id

    def enter(self, stage: Stage) -> None:
        """Moves on to `stage`; a stage already passed is ignored."""
        record = self.record
        if _ORDER[stage] <= _ORDER[record.state]:
            return
        now = self._started_at + time.monotonic() - self._started
        setattr(record, f"{stage.value}_at", now)
        record.state = stage
        self._save(record)

    def count_prompt_tokens(self, num_tokens: int) -> None:
        self.record.num_prompt_tokens += num_tokens
        self._metrics.prompt_tokens += num_tokens

    def count_cached_tokens(self, num_tokens: int) -> None:
        self.record.num_cached_tokens += num_tokens
        self._metrics.cached_tokens += num_tokens

    def note_route(self, engines: Sequence[str], detoks: Sequence[str]) -> None:
        """Which engines and detokenizers work for this request."""
        self.record.engine = ",".join(engines)
        self.record.detok = ",".join(detoks)

    def count_tokens(self, num_tokens: int) -> None:
        """Notes newly sampled tokens; the first begins the decoding stage."""
        self.record.num_output_tokens += num_tokens
        self._metrics.completion_tokens += num_tokens
        if self.record.state is not Stage.DECODING:
            self.enter(Stage.DECODING)

    def on_cancel(self, action: Callable[[], None]) -> None:
        """What a cancel does from now on; done at once when one was asked for before."""
        self._on_cancel = action
        if self.cancel_requested:
            action()

    def cancel(self) -> None:
        """Ends the request wherever it is. Idempotent."""
        if not self.cancel_requested:
            self.cancel_requested = True
            if self._on_cancel is not None:
                self._on_cancel()

    def on_timeout(self, action: Callable[[], None]) -> None:
        """What the end of the request's time does from now on; done at once when it is over."""
        self._on_timeout = action
        if self.timed_out:
            action()

    def time_out(self) -> None:
        """The request's time is over."""
        self.timed_out = True
        if self._on_timeout is not None:
            self._on_timeout()

    def finish(self, reason: str) -> None:
        """The end; only the first one counts."""
        record = self.record
        if not record.is_live:
            return
        record.finish_reason = reason
        self.enter(Stage.FINISHED)
        self._metrics.note_finish(record)

    def fail(self, error: TokenlineError) -> None:
        if not self.record.is_live:
            return
        if isinstance(error, RequestCancelled):
            self.finish("cancelled")
            return
        reason = "timeout" if isinstance(error, RequestTimeout) else "error"
        self.record.error_code = error.code or None
        self.record.error_message = error.message
        self.finish(reason)
