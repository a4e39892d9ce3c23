"""Sends the answer of a run, streamed or whole; the endpoints' forms say how it looks."""

import operator
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientDisconnected, HandedOver, as_typed
from gateway.event_ids import beyond_the_end
from gateway.interruption import ended_by_disconnect
from gateway.output_reader import OutputReader
from gateway.runs import Opened
from gateway.sse import EventStream
from protos.detok.v1 import detok_pb2

# A whole answer has no pings to send; it only looks up this often.
_PATIENCE_SECONDS: Final = 60.0


def answer(opened: Opened, ping_seconds: float) -> Response:
    """The response that tells of a run, as its job asks for it."""
    if opened.run.job.streams:
        return StreamedAnswer(opened, ping_seconds)
    return WholeAnswer(opened)


class StreamedAnswer(Response):
    """Streams what the run logs and the client lacks. Errors before the first output are HTTP
    errors, unless the client goes on with a stream that it has begun of.
    """

    def __init__(self, opened: Opened, ping_seconds: float) -> None:
        self._run, self._form, self._had = opened
        self._ping_seconds = ping_seconds
        self._reader = OutputReader(self._run.log, self._had, self._pass_over)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, self._run.request_id)
        try:
            with suppress(ClientDisconnected), self._run.being_read():
                async with ended_by_disconnect(receive):
                    await self.answer(stream)
        except HandedOver:
            # A response that is not complete makes the client come again, to another gateway.
            if not stream.started:
                raise

    async def answer(self, stream: EventStream) -> None:
        """Writes the whole answer to `stream`. Raises HandedOver where it goes on elsewhere."""
        try:
            last = await self._stream_outputs(stream)
        except HandedOver:
            raise
        except Exception as error:
            if not stream.started:
                raise
            last = self._with_id(self._form.failure_events(as_typed(error)))
        await stream.close(last + self._with_id(self._form.end_of_stream))

    async def _stream_outputs(self, stream: EventStream) -> bytes:
        """Sends every output, and returns the events that end the stream."""
        log, reader = self._run.log, self._reader
        while not await log.until_begun(self._ping_seconds):
            await stream.send(self._form.ping)
        if log.head is not None:
            self._form.begin(in_reasoning=log.head.in_reasoning)
        sent_at = time.monotonic()
        while True:
            outputs = await reader.next_outputs(self._ping_seconds)
            if log.broken is not None:
                raise log.broken
            if not stream.started and not self._had and log.error is not None:
                raise log.error
            events = self._events(outputs)
            if reader.is_at_end:
                break
            # Outputs may have nothing to say for long, as those of a call that is not yet one.
            if events or not outputs or time.monotonic() - sent_at >= self._ping_seconds:
                await stream.send(events or self._form.ping)
                sent_at = time.monotonic()
        is_whole = log.error is None
        if is_whole and not stream.started and any(map(operator.gt, self._had, log.num_events)):
            raise beyond_the_end()
        if log.error is None:
            return events + self._with_id(await self._form.last_events(reader.usage))
        if events:
            await stream.send(events)
        raise log.error

    def _events(self, outputs: Sequence[detok_pb2.Output]) -> bytes:
        form, reader = self._form, self._reader
        events: list[bytes] = []
        for output in outputs:
            reader.advance(output)
            event = form.output_events(output.sequence_id, output, reader.usage)
            if event and form.has_event_ids:
                event = reader.id_line() + event
            events.append(event)
        return events[0] if len(events) == 1 else b"".join(events)

    def _pass_over(self, output: detok_pb2.Output) -> None:
        """What the client has is told again to the form only, which goes on after it."""
        self._form.output_events(output.sequence_id, output, self._reader.usage)

    def _with_id(self, event: bytes) -> bytes:
        """`event`, where there is one, with the id that says how far the client has come."""
        return self._reader.id_line() + event if event and self._form.has_event_ids else event


class WholeAnswer(Response):
    """Answers with one JSON body when all is there."""

    def __init__(self, opened: Opened) -> None:
        self._run, self._form, _ = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"x-request-id": self._run.request_id}
        with suppress(ClientDisconnected), self._run.being_read():
            async with ended_by_disconnect(receive):
                body = await self._collect()
                response = Response(body, headers=headers, media_type="application/json")
                await response(scope, receive, send)

    async def _collect(self) -> bytes:
        log, reader = self._run.log, OutputReader(self._run.log)
        while not await log.until_begun(_PATIENCE_SECONDS):
            pass
        if log.head is not None:
            self._form.begin(in_reasoning=log.head.in_reasoning)
        choices = [self._form.new_choice() for _ in log.num_tokens]
        while not reader.is_at_end:
            for output in await reader.next_outputs(_PATIENCE_SECONDS):
                reader.advance(output)
                choices[output.sequence_id].add(output)
            if log.broken is not None:
                raise log.broken
        if log.error is not None:
            raise log.error
        return await self._form.whole(choices, reader.usage)
