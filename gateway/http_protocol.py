"""HTTP/1.1 on a connection: uvicorn's protocol with bounded heads and errors in JSON."""

from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.errors import error_body
from protos.wire.errors import InvalidRequest

# Ample for any cookie or trace; a request line and headers beyond it are refused.
MAX_HEAD_BYTES: Final = 64 << 10
# A client that goes on sending after a refusal sees the refusal only if what it sends is read:
# closing at once would reset the connection. This much is read and thrown away, for this long.
MAX_DISCARDED_BYTES: Final = 16 << 20
_LINGER_SECONDS: Final = 2.0
_HEAD_TOO_LARGE: Final = 431


class HttpProtocol(HttpToolsProtocol):
    """One connection. A request whose head is too large gets 431, one that is no HTTP gets 400.

    Where requests before it are not yet answered, they are, and the connection ends after them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading_head = True
        # Bytes received since the head began, while it is not complete; bytes parsed of it.
        self._num_received = 0
        self._num_parsed = 0
        self._num_discarded = 0
        self._refused = False
        # The request that the application works on, or worked on last.
        self._running: RequestResponseCycle | None = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discard(data)
            return
        # Reset when a head or a message ends in this piece, which then need not be counted.
        self._num_received += len(data)
        super().data_received(data)
        if self._reading_head and self._num_received > MAX_HEAD_BYTES and not self._refused:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._num_parsed = self._num_discarded = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._num_received = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discard(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading_head = True
        self._num_received = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refused and not self._is_answering:
            self._end()

    def send_400_response(self, msg: str) -> None:
        """Answers what cannot be parsed, unless answers before it are due; takes no more requests.

        What cannot be parsed may be the rest of a request whose head was taken: then its own answer
        is due only if that has begun.
        """
        self._refused = True
        newest = self.cycle
        if newest is not None and newest.more_body and not newest.response_started:
            newest.disconnected = True
            newest.message_event.set()
            if self.pipeline and self.pipeline[0][0] is newest:
                self.pipeline.popleft()
        if self._is_answering:
            self.flow.resume_reading()
            return
        if self._reading_head and max(self._num_received, self._num_parsed) > MAX_HEAD_BYTES:
            status, text = _HEAD_TOO_LARGE, f"The request's head is over {MAX_HEAD_BYTES} bytes."
        else:
            status, text = 400, "This is not a valid HTTP/1.1 request."
        body = msgspec.json.encode(error_body(InvalidRequest(text, code="invalid_http")))
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\n"
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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _end(self) -> None:
        """Says that nothing more comes, and closes once the client can have read it."""
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.close)

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
