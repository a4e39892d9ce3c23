"""HTTP/1.1 on a connection: uvicorn's protocol with bounds on what a client may send, and how
slowly, and errors in JSON.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.connection_limits import Admittance, Connections
from gateway.connection_watch import ReceiveWatch, SendWatch
from gateway.errors import RETRY_AFTER_SECONDS, error_body
from protos.wire.errors import InvalidRequest, RequestTimeout, TokenlineError, Unavailable

logger = logging.getLogger(__name__)

# Ample for any cookie or trace; a request line and headers beyond it are refused.
MAX_HEAD_BYTES: Final = 64 << 10
# Requests that wait on a connection for the answers before theirs. Each costs some 3 KB, and one
# piece from the network may hold 14,000.
MAX_PIPELINED: Final = 32
# What frames the pieces of a chunked body may take this many bytes, and as many again for each
# byte of the body; the longest sensible frame of one byte takes 5.
_FREE_FRAME_BYTES: Final = 64 << 10
_FRAME_BYTES_PER_BYTE: Final = 16
# A client that goes on sending after a refusal sees the refusal only if what it sends is read:
# closing at once would reset the connection. This much is read and thrown away, for this long.
MAX_DISCARDED_BYTES: Final = 16 << 20
_LINGER_SECONDS: Final = 2.0
_VERSIONS: Final = frozenset({"1.0", "1.1"})


class HttpProtocol(HttpToolsProtocol):
    """One connection. A request whose head is too large gets 431, one that comes too slowly 408,
    one that is no HTTP 400; a connection too many gets 503.

    Where requests before it are not yet answered, they are, and the connection ends after them.
    """

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all = connections
        self._reading_head = True
        # Whether a byte of the request that is being read, or is to be read next, has come.
        self._has_begun = False
        # Bytes received since the head began, while it is not complete; bytes parsed of it.
        self._num_received = 0
        self._num_parsed = 0
        # Bytes received since the head was complete.
        self._num_after_head = 0
        self._num_discarded = 0
        self._refused = False
        # The request that the application works on, or worked on last.
        self._running: RequestResponseCycle | None = None
        limits = connections.limits
        self._receiving = ReceiveWatch(
            self.loop, limits, lambda: self.flow.read_paused, self._receive_too_slow
        )
        self._sending = SendWatch(
            self.loop,
            limits.send_timeout_seconds,
            lambda: self.transport.get_write_buffer_size(),
            self._send_stalled,
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        admittance = self._all.add(self)
        if admittance is Admittance.TAKEN:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif admittance is Admittance.REFUSED:
            self._refuse(503, Unavailable("Too many connections are open.", code="overloaded"))
        else:
            self._refused = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._receiving.stop()
        self._sending.stop()
        self._unset_keepalive_if_required()
        # uvicorn knows the newest request only, which may be one that waits.
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Closes the connection, which waits for a request."""
        self._all.end_waiting(self)
        self._refused = True
        self._close()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discard(data)
            return
        # Reset when a head or a message ends in this piece, which then need not be counted.
        self._num_received += len(data)
        self._num_after_head += len(data)
        self._has_begun = True
        super().data_received(data)
        if self._refused:
            return
        if self._is_excessive:
            self.send_400_response("")
        elif not self._has_begun:
            self._receiving.stop()
        elif self._reading_head:
            self._receiving.head_is_pending()
        else:
            self._receiving.body_is_pending()

    def on_message_begin(self) -> None:
        self._has_begun = True
        self._num_parsed = self._num_discarded = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        # What comes after a body is counted, and otherwise ignored.
        if self._reading_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in _VERSIONS or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("no version of HTTP that is spoken here, or one request too many")
        self._reading_head = False
        self._num_received = self._num_after_head = self._receiving.num_body_bytes = 0
        self._receiving.stop()
        self._all.end_waiting(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._receiving.num_body_bytes += len(body)
        if self.cycle.response_complete:
            self._discard(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading_head = True
        self._has_begun = False
        self._num_received = 0
        self._receiving.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answering:
            return
        self._sending.start()
        if self._refused:
            self._end()
        elif not self.transport.is_closing():
            self._all.begin_waiting(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending.start()

    def resume_writing(self) -> None:
        # What is left of a complete answer is watched to its end.
        if self._is_answering:
            self._sending.stop()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        """Refuses what cannot be parsed."""
        is_large = self._reading_head and max(self._num_received, self._num_parsed) > MAX_HEAD_BYTES
        if is_large:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE.value
            text = f"The request's head is over {MAX_HEAD_BYTES} bytes."
        else:
            status, text = 400, "This is not a valid HTTP/1.1 request."
        self._refuse(status, InvalidRequest(text, code="invalid_http"))

    def _refuse(self, status: int, error: TokenlineError) -> None:
        """Answers with an error, unless answers before it are due; takes no more requests.

        What is refused may be the rest of a request whose head was taken: then its own answer
        is due only if that has begun.
        """
        self._refused = True
        self._all.end_waiting(self)
        self._receiving.stop()
        newest = self.cycle
        if newest is not None and newest.more_body and not newest.response_started:
            newest.disconnected = True
            newest.message_event.set()
            if self.pipeline and self.pipeline[0][0] is newest:
                self.pipeline.popleft()
        if self._is_answering:
            self.flow.resume_reading()
            return
        is_answered = not self._reading_head and newest is not None and newest.response_complete
        if not is_answered and not self.transport.is_closing():
            retry = b"retry-after: %d\r\n" % RETRY_AFTER_SECONDS if status == 503 else b""
            body = msgspec.json.encode(error_body(error))
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + retry
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
        self._end()

    @property
    def _is_answering(self) -> bool:
        """Whether an answer is due to a request that came whole, or has begun."""
        cycle = self._running
        is_running = cycle is not None and not (cycle.response_complete or cycle.disconnected)
        return is_running or bool(self.pipeline)

    @property
    def _is_excessive(self) -> bool:
        """Whether a head is too large, or a body mostly consists of what frames its pieces."""
        if self._reading_head:
            return self._num_received > MAX_HEAD_BYTES
        num_body = self._receiving.num_body_bytes
        return self._num_after_head > _FREE_FRAME_BYTES + (_FRAME_BYTES_PER_BYTE + 1) * num_body

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._sending.stop()
        super()._start_asgi_task(cycle, app)

    def _receive_too_slow(self, why: str) -> None:
        what = "headers were" if self._reading_head else "body was"
        text = f"The request's {what} not complete in time: {why}."
        logger.info("a request was given up: %s", text)
        self._refuse(408, RequestTimeout(text, code="request_too_slow"))

    def _send_stalled(self) -> None:
        seconds = self._all.limits.send_timeout_seconds
        logger.info("a client took nothing for %g seconds; its connection is ended", seconds)
        self.transport.abort()

    def _end(self) -> None:
        """Says that nothing more comes, and closes once the client can have read it."""
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self._close)

    def _close(self) -> None:
        """Closes the connection, once what is there for the client is sent."""
        if not self.transport.is_closing():
            self._sending.start()
            self.transport.close()

    def _discard(self, data: bytes) -> None:
        self._num_discarded += len(data)
        if self._num_discarded <= MAX_DISCARDED_BYTES:
            return
        if self._refused and self._is_answering:
            self.flow.pause_reading()
        else:
            self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._num_parsed += num_bytes
        if self._num_parsed > MAX_HEAD_BYTES:
            # httptools turns what a callback raises into a parser error, and stops.
            raise ValueError("the head of the request is too large")
