"""The serving end of a multiplexed stream: many sequences, one bidirectional call.

Commands are handed to a handler in order. Outputs go to an `Outbox`, which sends whatever has
gathered since its last write as one message, merged per sequence: a reader that falls behind gets
fewer, larger outputs, and what waits for it is bounded by what its sequences may produce. While
sequences are live, something is sent twice a second, so that a caller can tell slow from gone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final, Generic, Protocol

import grpc
from google.protobuf.message import DecodeError

from protos.common.v1 import common_pb2
from protos.wire.errors import InternalError, TokenlineError, to_proto
from protos.wire.logs import request_context
from protos.wire.stream_adapter import OutputT, StreamAdapter, SubmitT

logger = logging.getLogger(__name__)

# Outputs beyond this go into a further message; far below the channel's limit.
_MESSAGE_BYTES: Final = 8 << 20
# While sequences are live, no more time than this passes between the starts of two writes.
_HEARTBEAT_SECONDS: Final = 0.5
# How long the last write of a stream may take once the stream is over.
_LAST_WRITE_SECONDS: Final = 1.0


class Outbox(Generic[SubmitT, OutputT]):
    """Outputs on their way to the caller of one stream. For use on the event loop's thread."""

    def __init__(self, adapter: StreamAdapter[SubmitT, OutputT]) -> None:
        self._adapter: StreamAdapter[SubmitT, OutputT] = adapter
        self._live: set[int] = set()
        self._pending: dict[int, OutputT] = {}
        self._touched = False
        self._wakeup = asyncio.Event()
        self._num_written = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, so that outputs reach nobody."""
        return self._closed

    @property
    def live(self) -> frozenset[int]:
        """Ids of the sequences that were submitted and have no finish yet."""
        return frozenset(self._live)

    def emit(self, output: OutputT) -> None:
        """Queues `output`; one with `finish` ends its sequence, and later ones are dropped."""
        sequence_id = output.sequence_id
        if sequence_id not in self._live:
            return
        if output.HasField("finish"):
            self._live.discard(sequence_id)
        pending = self._pending.get(sequence_id)
        if pending is None:
            self._pending[sequence_id] = output
        else:
            self._adapter.merge(pending, output)
        self._wakeup.set()

    def fail(self, sequence_id: int, error: TokenlineError) -> None:
        """Ends a sequence with FINISH_REASON_ERROR."""
        finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_ERROR, error=to_proto(error))
        self.emit(self._adapter.make_output(sequence_id, finish))

    def touch(self) -> None:
        """Sends a response soon, even when it holds no output."""
        self._touched = True
        self._wakeup.set()

    def begin(self, sequence_id: int) -> bool:
        """Makes a sequence live; False when one of this id already is."""
        if sequence_id in self._live or sequence_id in self._pending:
            return False
        self._live.add(sequence_id)
        return True

    def close(self) -> None:
        """Drops what is not written; `write_to` returns after the write it is in."""
        self._closed = True
        self._live.clear()
        self._pending.clear()
        self._touched = False
        self._wakeup.set()

    async def write_to(self, context: Any) -> None:
        """Writes responses until `close`; runs beside the reading of commands."""
        while not self._closed:
            await self._wakeup.wait()
            self._wakeup.clear()
            while self._pending or self._touched:
                self._touched = False
                self._num_written += 1
                await context.write(self._adapter.make_response(self._take()))

    async def keep_heard(self) -> None:
        """Has something written in every half of the heartbeat in which nothing else is."""
        while not self._closed:
            num_written = self._num_written
            await asyncio.sleep(_HEARTBEAT_SECONDS / 2)
            if self._live and self._num_written == num_written:
                self.touch()

    def _take(self) -> list[OutputT]:
        outputs = list(self._pending.values())
        size = 0
        for index, output in enumerate(outputs):
            size += output.ByteSize()
            if size > _MESSAGE_BYTES and index:
                del outputs[index:]
                for taken in outputs:
                    del self._pending[taken.sequence_id]
                return outputs
        self._pending.clear()
        return outputs


class StreamHandler(Protocol[SubmitT, OutputT]):
    """What a service does with commands. Called on the event loop; neither call may block."""

    def submit(self, submit: SubmitT, outbox: Outbox[SubmitT, OutputT]) -> None:
        """Begins a sequence, which must end in one output with `finish`.

        A TokenlineError raised here becomes that finish.
        """

    def abort(self, sequence_id: int, outbox: Outbox[SubmitT, OutputT]) -> None:
        """Ends a sequence with FINISH_REASON_CANCELLED; unknown ids are ignored."""


async def serve_stream(
    request_iterator: AsyncIterator[Any],
    context: Any,
    handler: StreamHandler[SubmitT, OutputT],
    adapter: StreamAdapter[SubmitT, OutputT],
) -> None:
    """The body of a servicer's Generate. However the call ends, its live sequences are aborted."""
    # The caller waits for these: they say that this process does not hang.
    await context.send_initial_metadata(())
    outbox: Outbox[SubmitT, OutputT] = Outbox(adapter)
    writer = asyncio.create_task(outbox.write_to(context))
    heartbeat = asyncio.create_task(outbox.keep_heard())
    fault = ""
    try:
        fault = await _take_commands(request_iterator, handler, outbox)
    finally:
        live = outbox.live
        outbox.close()
        heartbeat.cancel()
        for sequence_id in live:
            handler.abort(sequence_id, outbox)
        ending = asyncio.create_task(_end(writer))
        while not ending.done():
            # gRPC loses a status that is sent into the middle of a write, and the caller would
            # wait for ever: not even a second cancel may cut this short.
            with suppress(asyncio.CancelledError):
                await asyncio.shield(ending)
    if fault:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)


async def _end(writer: asyncio.Task[None]) -> None:
    """Lets the writer end its last write; one that its reader holds up is given up."""
    await asyncio.wait((writer,), timeout=_LAST_WRITE_SECONDS)
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)


async def _take_commands(
    request_iterator: AsyncIterator[Any],
    handler: StreamHandler[SubmitT, OutputT],
    outbox: Outbox[SubmitT, OutputT],
) -> str:
    """Hands commands to the handler until the caller is done; says what broke the protocol."""
    try:
        async for request in request_iterator:
            command = request.WhichOneof("command")
            if command == "abort":
                handler.abort(request.abort.sequence_id, outbox)
            elif command == "submit":
                if not outbox.begin(request.submit.sequence_id):
                    return f"sequence_id {request.submit.sequence_id} is already live"
                _submit(request.submit, handler, outbox)
            else:
                return "command is missing"
    except DecodeError:
        return "a command cannot be parsed"
    return ""


def _submit(
    submit: Any, handler: StreamHandler[SubmitT, OutputT], outbox: Outbox[SubmitT, OutputT]
) -> None:
    with request_context(submit.request_id, submit.traceparent):
        try:
            handler.submit(submit, outbox)
        except TokenlineError as error:
            outbox.fail(submit.sequence_id, error)
        except Exception:
            logger.exception("a submit failed")
            outbox.fail(
                submit.sequence_id,
                InternalError("The service failed on this request; see its log."),
            )
