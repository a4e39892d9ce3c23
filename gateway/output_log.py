"""All outputs of one run, in order of arrival: written once, read by any number of readers."""

import asyncio
import bisect
from collections.abc import Sequence
from typing import Final

from gateway.output_cut import num_events
from gateway.run_batches import RunHead, end_batch, end_of, head_batch, outputs_batch, read_batch
from protos.detok.v1 import detok_pb2
from protos.wire.errors import TokenlineError

# Outputs that are kept as messages: each keeps alive the whole message that it came in, which holds
# those of other requests too.
_MAX_RECENT: Final = 64


class OutputLog:
    """Outputs are numbered from 0, across choices; `sequence_id` of each is its choice.

    retains: whether every output can be read at any time, and by `batches`. A log that does not
    retain has one reader, and forgets what that has read.
    """

    def __init__(self, num_choices: int, *, retains: bool = True) -> None:
        self.retains = retains
        self.head: RunHead | None = None
        self.ended = False
        self.error: TokenlineError | None = None
        # Why there is no more to read here, though the run goes on elsewhere.
        self.broken: TokenlineError | None = None
        # Per choice: the tokens that are listed, how far it has come as `num_events` counts, and
        # how it ended (common_pb2.FinishReason; 0 while it has not).
        self.num_tokens = [0] * num_choices
        self.num_events = [0] * num_choices
        self.finish_reasons = [0] * num_choices
        self.num_cached_tokens = 0
        self._recent: list[detok_pb2.Output] = []
        # The number of the first recent output.
        self._recent_start = 0
        # What was packed, and the number of the first output that each batch holds, or would.
        self._batches: list[bytes] = []
        self._batch_starts: list[int] = []
        # Until when each waits at most.
        self._waiters: list[tuple[float, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """How many outputs there were."""
        return self._recent_start + len(self._recent)

    def begin(self, head: RunHead) -> None:
        """The prompt is known. Only the first call counts."""
        if self.head is None:
            self.head = head
            self._add_batch(head_batch(head))
            self._wake()

    def append(self, index: int, output: detok_pb2.Output) -> None:
        """`output` of choice `index`, which is the log's from now on."""
        if self.broken is not None:
            return
        output.sequence_id = index
        num_tokens = len(output.token_ids)
        self.num_tokens[index] += num_tokens
        self.num_events[index] += num_tokens or num_events(output)
        self.num_cached_tokens += output.num_cached_tokens
        if output.HasField("finish"):
            self.finish_reasons[index] = output.finish.reason
        self._recent.append(output)
        if len(self._recent) >= _MAX_RECENT and self.retains:
            self._seal()
        if self._waiters:
            self._wake()

    def break_off(self, reason: TokenlineError) -> None:
        """Those who read along are to go elsewhere. Nothing is taken any more."""
        self.broken = reason
        self._wake()

    def end(self, error: TokenlineError | None = None) -> None:
        """Nothing follows. Only the first call counts."""
        if self.ended or self.broken is not None:
            return
        self.ended = True
        self.error = error
        self._seal()
        self._add_batch(end_batch(end_of(error)))
        self._wake()

    def entries(self, start: int) -> Sequence[detok_pb2.Output]:
        """The outputs from number `start` on. To be copied before they are changed."""
        if start >= self._recent_start:
            outputs = self._recent[start - self._recent_start :]
            if not self.retains:
                self._recent_start += len(self._recent)
                self._recent = []
            return outputs
        found: list[detok_pb2.Output] = []
        for number in range(bisect.bisect_right(self._batch_starts, start) - 1, len(self._batches)):
            outputs_or_more = read_batch(self._batches[number])
            if isinstance(outputs_or_more, list):
                found += outputs_or_more[max(0, start - self._batch_starts[number]) :]
        return found + self._recent

    def batches(self, start: int) -> list[bytes]:
        """All that is retained, packed, from batch `start` on; more follow unless it has ended."""
        self._seal()
        return self._batches[start:]

    async def until_begun(self, timeout_seconds: float) -> bool:
        """Waits until the prompt is known, or there will be no more; whether it is so."""
        if self.head is None and not self.is_over:
            await self.change(timeout_seconds)
        return self.head is not None or self.is_over

    def change(self, timeout_seconds: float) -> asyncio.Future[None]:
        """To be awaited: done at the next change, or after `timeout_seconds`."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        ends_at = loop.time() + timeout_seconds
        self._waiters.append((ends_at, waiter))
        # One timer for all waits: there is one for each token, and hardly any lasts so long.
        if self._timer is None or self._timer.when() > ends_at:
            self._set_timer(ends_at)
        return waiter

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.ended or self.broken is not None

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._look_at_waiters)

    def _look_at_waiters(self) -> None:
        """Some wait may have lasted as long as it is to."""
        now = asyncio.get_running_loop().time()
        self._timer = None
        waiters, self._waiters = self._waiters, []
        for ends_at, waiter in waiters:
            if ends_at <= now:
                _wake(waiter)
            elif not waiter.done():
                self._waiters.append((ends_at, waiter))
        if self._waiters:
            self._set_timer(min(ends_at for ends_at, _ in self._waiters))

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.is_over and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _seal(self) -> None:
        """Packs what is recent."""
        if self._recent and self.retains:
            self._add_batch(outputs_batch(self._recent))
            self._recent_start += len(self._recent)
            self._recent = []

    def _add_batch(self, batch: bytes) -> None:
        if self.retains:
            self._batches.append(batch)
            self._batch_starts.append(self._recent_start)


def gathered(log: OutputLog) -> dict[int, detok_pb2.Output]:
    """Everything that the choices have, by index, each as one output."""
    outputs: dict[int, detok_pb2.Output] = {}
    texts: dict[int, list[str]] = {}
    for entry in log.entries(0) if log.retains else ():
        index = entry.sequence_id
        texts.setdefault(index, []).append(entry.text)
        outputs.setdefault(index, detok_pb2.Output()).MergeFrom(entry)
    for index, output in outputs.items():
        output.text = "".join(texts[index])
    return outputs


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
