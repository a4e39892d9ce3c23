"""DetokService: drives engines for gateways and turns their ids into text."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from detok_svc.engine_link import EngineLinks
from detok_svc.sequence_start import start_sequence
from detok_svc.stop_strings import StopAutomata
from detok_svc.text_stream import TextStream
from detok_svc.token_bytes import TokenBytes
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2, detok_pb2_grpc
from protos.engine.v1 import engine_pb2
from protos.wire.errors import InternalError, TokenlineError, Unavailable
from protos.wire.logs import request_context
from protos.wire.multiplex_server import Outbox, serve_stream
from protos.wire.stream_adapter import detok_adapter

logger = logging.getLogger(__name__)

SERVICE: Final = "protos.detok.v1.DetokService"
_DRAIN_POLL_SECONDS: Final = 0.05

TextOutbox = Outbox[detok_pb2.Submit, detok_pb2.Output]


class DetokService(detok_pb2_grpc.DetokServiceServicer):
    """The servicer. Its state is that of the live sequences of each gateway's stream."""

    def __init__(
        self, model: common_pb2.ModelIdentity, tokens: TokenBytes, engines: EngineLinks
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._engines = engines
        self._automata = StopAutomata()
        self._streams: set[_GatewayStream] = set()
        self._draining = False

    # grpc.aio also takes a coroutine that writes to the context; the type stubs do not know it.
    async def Generate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[detok_pb2.GenerateRequest], context: Any
    ) -> None:
        stream = _GatewayStream(self._tokens, self._automata, self._engines)
        stream.draining = self._draining
        self._streams.add(stream)
        try:
            with self._engines.listening(stream.note_load):
                await serve_stream(
                    request_iterator, context, stream, detok_adapter(stream.take_loads)
                )
        finally:
            self._streams.discard(stream)

    async def GetStatus(
        self, request: detok_pb2.GetStatusRequest, context: Any
    ) -> detok_pb2.GetStatusResponse:
        return detok_pb2.GetStatusResponse(model=self._model)

    @property
    def num_live(self) -> int:
        """Sequences, of all gateways, that have no finish yet."""
        return sum(stream.num_live for stream in self._streams)

    async def drain(self, seconds: float) -> None:
        """Refuses new sequences, lets the others end for so long, then ends them.

        What is left ends as UNAVAILABLE: it is not at fault, and can be continued elsewhere.
        """
        self._draining = True
        for stream in self._streams:
            stream.draining = True
        deadline = time.monotonic() + seconds
        while self.num_live and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if self.num_live:
            logger.warning("%d sequences are still live after %s s", self.num_live, seconds)
        for stream in self._streams:
            stream.fail_all(_detok_draining())


def _detok_draining() -> Unavailable:
    return Unavailable("This detokenizer is shutting down.", code="detok_draining")


class _GatewayStream:
    """The sequences that one gateway's stream carries (a StreamHandler)."""

    def __init__(self, tokens: TokenBytes, automata: StopAutomata, engines: EngineLinks) -> None:
        self._tokens = tokens
        self._automata = automata
        self._engines = engines
        self._sequences: dict[int, _Sequence] = {}
        # By engine address: what the next response reports.
        self._loads: dict[str, detok_pb2.EngineLoadReport] = {}
        self._outbox: TextOutbox | None = None
        self.draining = False

    @property
    def num_live(self) -> int:
        return len(self._sequences)

    def submit(self, submit: detok_pb2.Submit, outbox: TextOutbox) -> None:
        self._outbox = outbox
        if self.draining:
            raise _detok_draining()
        link = self._engines.link(submit.engine_address)
        start = start_sequence(submit, self._tokens, self._automata)
        if isinstance(start, detok_pb2.Output):
            outbox.emit(start)
            return
        sequence = _Sequence(
            submit.sequence_id, submit.request_id, submit.traceparent, start.stream, outbox, self
        )
        sequence.abort_engine = link.submit(start.engine_submit, sequence.take)
        self._sequences[submit.sequence_id] = sequence
        logger.debug("submitted to engine %s", submit.engine_address)

    def abort(self, sequence_id: int, outbox: TextOutbox) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            sequence.cancel()

    def fail_all(self, error: TokenlineError) -> None:
        """Ends every sequence with `error`."""
        for sequence in list(self._sequences.values()):
            sequence.fail(error)

    def end(self, sequence_id: int) -> None:
        """Forgets a sequence that has its finish."""
        del self._sequences[sequence_id]

    def note_load(self, report: detok_pb2.EngineLoadReport) -> None:
        self._loads[report.engine_address] = report
        if self._outbox is not None:
            self._outbox.touch()

    def take_loads(self) -> list[detok_pb2.EngineLoadReport]:
        """The latest load of each engine heard from since the last call."""
        loads = list(self._loads.values())
        self._loads.clear()
        return loads


def _do_nothing() -> None:
    return


@dataclass(slots=True)
class _Sequence:
    """One live sequence: joins its text stream with the engine's stream and the gateway's."""

    sequence_id: int
    request_id: str
    traceparent: str
    stream: TextStream
    outbox: TextOutbox
    owner: _GatewayStream
    abort_engine: Callable[[], None] = field(default=_do_nothing)

    def take(self, output: engine_pb2.Output) -> None:
        """The engine's sink. What the engine still sends after the finish is dropped."""
        if self.stream.finished:
            return
        try:
            text_output = self.stream.take(output)
        except Exception:
            with request_context(self.request_id, self.traceparent):
                logger.exception("an output of the engine could not be decoded")
            self.stream.finished = True
            self.outbox.fail(
                self.sequence_id, InternalError("The detokenizer failed on this request.")
            )
        else:
            if text_output is not None:
                self.outbox.emit(text_output)
        if self.stream.finished:
            self._end(output)

    def cancel(self) -> None:
        """Answers an abort at once; the engine's own end of the sequence is not waited for."""
        self.outbox.emit(self.stream.cancel())
        self.owner.end(self.sequence_id)
        self.abort_engine()

    def fail(self, error: TokenlineError) -> None:
        """Ends the sequence, with nothing flushed, so that it can be continued elsewhere."""
        self.stream.finished = True
        self.outbox.fail(self.sequence_id, error)
        self.owner.end(self.sequence_id)
        self.abort_engine()

    def _end(self, output: engine_pb2.Output) -> None:
        self.owner.end(self.sequence_id)
        if not output.HasField("finish"):
            self.abort_engine()
        elif output.finish.reason == common_pb2.FINISH_REASON_ERROR:
            with request_context(self.request_id, self.traceparent):
                error = output.finish.error
                logger.warning("the engine ended with an error: %s %s", error.code, error.message)
