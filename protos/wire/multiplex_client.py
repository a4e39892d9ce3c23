"""The calling end of a multiplexed stream: one connection carries all sequences to one server.

Every submit ends in exactly one output with `finish`, whatever happens: the server's own, or one
made here when the connection is lost or cannot be made (`FINISH_REASON_ERROR`, kind UNAVAILABLE).
The connection is made again by itself, with back-off.
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
from protos.wire.errors import Unavailable, to_proto
from protos.wire.stream_adapter import OutputT, StreamAdapter, SubmitT

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS: Final = 0.05
_LAST_BACKOFF_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Sequence(Generic[SubmitT, OutputT]):
    """A live sequence: `submit` until it is written, then None."""

    sink: Callable[[OutputT], None]
    submit: SubmitT | None
    submitted_at: float
    aborted: bool = False


class OutputStream(Generic[OutputT]):
    """Outputs of one sequence as an async iterator. A slow reader gets merged outputs."""

    def __init__(self, merge: Callable[[OutputT, OutputT], None]) -> None:
        self._merge: Callable[[OutputT, OutputT], None] = merge
        self._pending: OutputT | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def put(self, output: OutputT) -> None:
        if self._pending is None:
            self._pending = output
        else:
            self._merge(self._pending, output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputT:
        if self._ended:
            raise StopAsyncIteration
        while self._pending is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._pending = self._pending, None
        self._ended = output.HasField("finish")
        return output


class StreamClient(Generic[SubmitT, OutputT]):
    """All sequences from this process to one server. An async context manager.

    `connect` begins the call (`stub.Generate`). `on_response` sees each response before its
    outputs. `lost_code` is the error code of sequences whose connection broke. Use on one event
    loop; sinks are called on it and must not block.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        adapter: StreamAdapter[SubmitT, OutputT],
        *,
        lost_code: str,
        on_response: Callable[[Any], None] | None = None,
        connect_timeout_seconds: float = 5.0,
    ) -> None:
        self._connect = connect
        self._adapter: StreamAdapter[SubmitT, OutputT] = adapter
        self._lost_code = lost_code
        self._on_response = on_response
        self._connect_timeout_seconds = connect_timeout_seconds
        self._ids = itertools.count(1)
        self._sequences: dict[int, _Sequence[SubmitT, OutputT]] = {}
        # Ids to submit or abort, in order; what to do with one is read off its _Sequence.
        self._commands: deque[int] = deque()
        self._wakeup = asyncio.Event()
        self._connected = False
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
            tasks = (
                asyncio.create_task(self._read(call)),
                asyncio.create_task(self._write(call)),
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
            if was_connected:
                backoff = _FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _LAST_BACKOFF_SECONDS)

    async def _read(self, call: Any) -> None:
        await asyncio.wait_for(call.wait_for_connection(), self._connect_timeout_seconds)
        self._connected = True
        while (response := await call.read()) is not grpc.aio.EOF:
            if self._on_response is not None:
                self._on_response(response)
            for output in response.outputs:
                self._deliver(output)

    async def _write(self, call: Any) -> None:
        await call.wait_for_connection()
        while True:
            while self._commands:
                # The command stays queued until it may be sent, and counts as sent before it is:
                # a submit must never go out twice.
                sequence_id = self._commands.popleft()
                sequence = self._sequences.get(sequence_id)
                if sequence is None:
                    continue
                if sequence.submit is not None:
                    request = self._adapter.submit_request(sequence.submit)
                    sequence.submit = None
                else:
                    request = self._adapter.abort_request(sequence_id)
                await call.write(request)
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
        """After a failed or broken connection: ends what it carried, and what waited too long."""
        oldest = asyncio.get_running_loop().time() - self._connect_timeout_seconds
        lost = [
            sequence_id
            for sequence_id, sequence in self._sequences.items()
            if sequence.submit is None or sequence.submitted_at < oldest
        ]
        self._lose(lost, reason)

    def _lose(self, sequence_ids: list[int], reason: str) -> None:
        if sequence_ids:
            logger.warning("lost %d sequences: %s", len(sequence_ids), reason)
        for sequence_id in sequence_ids:
            error = Unavailable(
                "A service was lost while it worked on this request; try again.",
                code=self._lost_code,
            )
            finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_ERROR, error=to_proto(error))
            self._deliver(self._adapter.make_output(sequence_id, finish))


def _why_ended(results: Sequence[BaseException | None]) -> str:
    """The reason to log for the end of a connection's reading and writing."""
    reason = "the server closed the stream"
    for result in results:
        if isinstance(result, grpc.aio.AioRpcError):
            reason = f"{result.code().name}: {result.details()}"
        elif isinstance(result, TimeoutError):
            reason = "no connection in time"
        elif isinstance(result, Exception):
            logger.error("a stream failed", exc_info=result)
            reason = f"{type(result).__name__}: {result}"
    return reason
