"""The calling end of a multiplexed stream: one connection carries all sequences to one server.

Every submit ends in exactly one output with `finish`, whatever happens: the server's own, or one
made here when the connection is lost or cannot be made (`FINISH_REASON_ERROR`, kind UNAVAILABLE).
The connection is made again by itself, with back-off. A server that is not heard from while it has
sequences to work on counts as lost: a stopped process and a cut wire keep a connection open.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, Self

import grpc

from protos.common.v1 import common_pb2
from protos.wire.errors import Unavailable
from protos.wire.output_stream import OutputStream
from protos.wire.stream_adapter import OutputT, StreamAdapter, SubmitT, lost_finish

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS: Final = 0.05
_LAST_BACKOFF_SECONDS: Final = 0.25
# How long a server may be silent: it sends something twice a second (multiplex_server.py).
_SILENCE_SECONDS: Final = 2.5
_CHECK_SECONDS: Final = 0.25


class _ServerSilent(Exception):
    """The server was not heard from for too long."""


@dataclass(slots=True)
class _Sequence(Generic[SubmitT, OutputT]):
    """A live sequence: `submit` until it is written, then None."""

    sink: Callable[[OutputT], None]
    submit: SubmitT | None
    submitted_at: float
    aborted: bool = False


class StreamClient(Generic[SubmitT, OutputT]):
    """All sequences from this process to one server. An async context manager.

    `connect` begins the call (`stub.Generate`). `on_response` sees each response before its
    outputs. `lost_code` is the error code of sequences whose connection broke (`lost_finish`). A
    connection is given up after `silence_seconds`, and so is a sequence without a connection. Use
    on one event loop; sinks are called on it and must not block.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        adapter: StreamAdapter[SubmitT, OutputT],
        *,
        lost_code: str,
        on_response: Callable[[Any], None] | None = None,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        self._connect = connect
        self._adapter: StreamAdapter[SubmitT, OutputT] = adapter
        self._lost_code = lost_code
        self._on_response = on_response
        self._silence_seconds = silence_seconds
        self._ids = itertools.count(1)
        self._sequences: dict[int, _Sequence[SubmitT, OutputT]] = {}
        # Ids to submit or abort, in order; what to do with one is read off its _Sequence.
        self._commands: deque[int] = deque()
        self._wakeup = asyncio.Event()
        self._connected = False
        # Times of the event loop: of the last sign of the server's life, of the start of the write
        # that is under way, and of the last time that this process proved to have been away.
        self._heard_at = 0.0
        self._writing_since: float | None = None
        self._awake_since = 0.0
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def num_live(self) -> int:
        """Sequences that have no finish yet."""
        return len(self._sequences)

    @property
    def connected(self) -> bool:
        return self._connected

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_connected())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose(list(self._sequences), "the connection was closed")

    def submit(self, submit: SubmitT, sink: Callable[[OutputT], None]) -> int:
        """Begins a sequence and returns its id, which is written into `submit`.

        `sink` is called with each output; the last one has `finish` set.
        """
        if self._closed:
            raise Unavailable("The service is shutting down.", code=self._lost_code)
        sequence_id = next(self._ids)
        submit.sequence_id = sequence_id
        now = asyncio.get_running_loop().time()
        if not self._sequences:
            self._heard_at = now
        self._sequences[sequence_id] = _Sequence(sink, submit, now)
        self._commands.append(sequence_id)
        self._wakeup.set()
        return sequence_id

    def abort(self, sequence_id: int) -> None:
        """Asks for the end of a sequence; its finish still comes. Ended ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.aborted:
            return
        sequence.aborted = True
        if sequence.submit is not None:
            finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_CANCELLED)
            self._deliver(self._adapter.make_output(sequence_id, finish))
            return
        self._commands.append(sequence_id)
        self._wakeup.set()

    @asynccontextmanager
    async def open(self, submit: SubmitT) -> AsyncIterator[OutputStream[OutputT]]:
        """Begins a sequence; leaving the block before its finish aborts it."""
        outputs: OutputStream[OutputT] = OutputStream(self._adapter.merge)
        sequence_id = self.submit(submit, outputs.put)
        try:
            yield outputs
        finally:
            self.abort(sequence_id)

    async def _keep_connected(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            call = self._connect()
            self._writing_since = None
            tasks = (
                asyncio.create_task(self._read(call)),
                asyncio.create_task(self._write(call)),
                asyncio.create_task(self._watch()),
            )
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                was_connected, self._connected = self._connected, False
                for task in tasks:
                    task.cancel()
                call.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            self._lose_written(_why_ended(results))
            self._lose_waiting(asyncio.get_running_loop().time())
            if was_connected:
                backoff = _FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _LAST_BACKOFF_SECONDS)

    async def _read(self, call: Any) -> None:
        await _wait_for_server(call)
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        self._connected = True
        while (response := await call.read()) is not grpc.aio.EOF:
            self._heard_at = loop.time()
            if self._on_response is not None:
                self._on_response(response)
            for output in response.outputs:
                self._deliver(output)

    async def _watch(self) -> None:
        """Raises _ServerSilent when the server has taken too long to be heard, or to take a write.

        Late checks show that this process was stopped or busy; what the server sent in that time
        is not read yet, so that its time begins anew.
        """
        loop = asyncio.get_running_loop()
        started_at = checked_at = loop.time()
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = loop.time()
            if now - checked_at > 2 * _CHECK_SECONDS:
                self._awake_since = now
            checked_at = now
            if not self._connected:
                self._lose_waiting(now)
                since = started_at
            elif not self._sequences:
                continue
            elif self._writing_since is not None:
                since = min(self._writing_since, self._heard_at)
            else:
                since = self._heard_at
            if now - max(since, self._awake_since) > self._silence_seconds:
                raise _ServerSilent

    async def _write(self, call: Any) -> None:
        # Not before: a submit that is written to a server that hangs is lost later than one that
        # waits, and may have been taken.
        await _wait_for_server(call)
        loop = asyncio.get_running_loop()
        while True:
            while self._commands:
                # The command stays queued until it may be sent, and counts as sent before it is:
                # a submit must never go out twice.
                sequence_id = self._commands.popleft()
                sequence = self._sequences.get(sequence_id)
                if sequence is None:
                    continue
                if sequence.submit is not None:
                    _spend(sequence.submit.record, loop.time() - sequence.submitted_at)
                    request = self._adapter.submit_request(sequence.submit)
                    sequence.submit = None
                else:
                    request = self._adapter.abort_request(sequence_id)
                self._writing_since = loop.time()
                await call.write(request)
                self._writing_since = None
            self._wakeup.clear()
            await self._wakeup.wait()

    def _deliver(self, output: OutputT) -> None:
        sequence = self._sequences.get(output.sequence_id)
        if sequence is None:
            return
        if output.HasField("finish"):
            del self._sequences[output.sequence_id]
        try:
            sequence.sink(output)
        except Exception:
            # One sequence's fault must not end the reading of all others.
            logger.exception("an output could not be taken")
            self.abort(output.sequence_id)

    def _lose_written(self, reason: str) -> None:
        """Ends what a broken connection carried."""
        written = [key for key, sequence in self._sequences.items() if sequence.submit is None]
        self._lose(written, reason)

    def _lose_waiting(self, now: float) -> None:
        """Without a connection, ends the sequences that have waited too long for one."""
        latest = now - self._silence_seconds
        if self._awake_since < latest:
            late = [key for key, each in self._sequences.items() if each.submitted_at < latest]
            self._lose(late, "no connection in time")

    def _lose(self, sequence_ids: list[int], reason: str) -> None:
        if sequence_ids:
            logger.warning("lost %d sequences: %s", len(sequence_ids), reason)
        for sequence_id in sequence_ids:
            if (sequence := self._sequences.get(sequence_id)) is not None:
                finish = lost_finish(self._lost_code, was_sent=sequence.submit is None)
                self._deliver(self._adapter.make_output(sequence_id, finish))


async def _wait_for_server(call: Any) -> None:
    """Returns once the server has taken the call; raises its AioRpcError if it does not."""
    await call.initial_metadata()
    await call.wait_for_connection()


def _spend(record: common_pb2.GenerationRecord, seconds: float) -> None:
    """Takes off what a sequence may take the time it waited here; its server ends a late one."""
    if record.timeout_ms:
        record.timeout_ms = max(1, record.timeout_ms - int(seconds * 1000))


def _why_ended(results: Sequence[BaseException | None]) -> str:
    """The reason to log for the end of a connection's reading and writing."""
    reason = "the server closed the stream"
    for result in results:
        if isinstance(result, grpc.aio.AioRpcError):
            reason = f"{result.code().name}: {result.details()}"
        elif isinstance(result, _ServerSilent):
            reason = "the server is silent"
        elif isinstance(result, Exception):
            logger.error("a stream failed", exc_info=result)
            reason = f"{type(result).__name__}: {result}"
    return reason
