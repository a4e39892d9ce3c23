"""Logs that say which request they belong to, and the W3C trace context that ties services."""

import contextvars
import logging
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class _RequestContext:
    request_id: str
    traceparent: str
    shown: str


_CONTEXT: contextvars.ContextVar[_RequestContext | None] = contextvars.ContextVar(
    "tokenline_request", default=None
)
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
_MAX_SHOWN_ID: Final = 128
_NOT_SHOWN = re.compile(r"[^\x21-\x7e]")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        context = _CONTEXT.get()
        if context is None:
            return line
        return f"{line} {context.shown}"


def configure_logging(service: str, level: str = "info") -> None:
    """Sends the process's log records to stderr as `time level service logger: message`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


@contextmanager
def request_context(request_id: str, traceparent: str) -> Iterator[None]:
    """Log records made inside carry `request_id` and the trace id of `traceparent`."""
    match = _TRACEPARENT.fullmatch(traceparent)
    # An id comes from outside: it must not begin a line of its own, or fill the log.
    shown = _NOT_SHOWN.sub("?", request_id[:_MAX_SHOWN_ID])
    shown = f"request_id={shown} trace_id={match[1] if match else ''}"
    token = _CONTEXT.set(_RequestContext(request_id, traceparent, shown))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def request_metadata() -> tuple[tuple[str, str], ...]:
    """What a unary call made inside a `request_context` carries, so that it goes on there."""
    context = _CONTEXT.get()
    if context is None:
        return ()
    return (("x-request-id", context.request_id), ("traceparent", context.traceparent))


def new_traceparent() -> str:
    """A sampled trace context with fresh trace and span ids."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def child_traceparent(parent: str) -> str:
    """A new span in `parent`'s trace; a new trace when `parent` is empty or malformed."""
    match = _TRACEPARENT.fullmatch(parent)
    if match is None:
        return new_traceparent()
    return f"00-{match[1]}-{secrets.token_hex(8)}-{match[2]}"
