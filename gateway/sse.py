"""Server-sent events: framing, headers that survive proxies, and the moment the head is sent."""

from typing import Any, Final

import msgspec
from starlette.types import Send

from gateway.errors import error_body
from protos.wire.errors import TokenlineError

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
# JSON allows these raw inside strings, but some clients take them for ends of lines.
_LINE_SEPARATORS: Final = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\u0085".encode(), b"\\u0085"),
)

_encode: Final = msgspec.json.Encoder().encode


def json_text(text: str) -> bytes:
    """`text` as a JSON string on one line."""
    encoded = _encode(text)
    if not text.isascii():
        for raw, escaped in _LINE_SEPARATORS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def event(body: object) -> bytes:
    """One event that holds `body` as JSON."""
    encoded = _encode(body)
    for raw, escaped in _LINE_SEPARATORS:
        encoded = encoded.replace(raw, escaped)
    return b"data: " + encoded + b"\n\n"


def error_event(error: TokenlineError) -> bytes:
    return event(error_body(error))


class EventStream:
    """The response. Its head goes out with the first bytes, so that what fails before is an HTTP
    error. request_id: of the request that is answered, where it may be another's than this one's.
    """

    def __init__(self, send: Send, request_id: str = "") -> None:
        self._send = send
        self._headers = list(_HEADERS)
        if request_id:
            self._headers.append((b"x-request-id", request_id.encode()))
        self.started = False

    async def send(self, events: bytes) -> None:
        """Sends whole events; waits while the client does not read."""
        await self._open()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def close(self, events: bytes) -> None:
        """Sends the last events and ends the response."""
        await self._open()
        message: dict[str, Any] = {"type": "http.response.body", "body": events}
        await self._send(message)

    async def _open(self) -> None:
        if not self.started:
            self.started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
