"""Errors as HTTP answers, in the shape of the OpenAI API."""

import logging
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.message_errors import message_error_body, shown_message
from protos.common.v1 import common_pb2
from protos.wire.errors import (
    InternalError,
    Overloaded,
    RequestCancelled,
    RequestTimeout,
    TokenlineError,
    Unavailable,
)

logger = logging.getLogger(__name__)

# What a client that gets 429 or 503 is told to wait.
RETRY_AFTER_SECONDS: Final = 1
# Below it, errors have the shape of Anthropic's API.
MESSAGES_PATH: Final = "/v1/messages"

_TYPES: Final[dict[type[TokenlineError], str]] = {
    Overloaded: "rate_limit_error",
    Unavailable: "service_unavailable_error",
    RequestTimeout: "timeout_error",
    RequestCancelled: "request_cancelled_error",
    InternalError: "server_error",
}


class Unauthorized(TokenlineError):
    """The request carries no API key that is known."""

    kind = common_pb2.ERROR_KIND_INVALID_REQUEST
    http_status = 401


class QueueFull(Overloaded):
    """More requests wait than can be served soon. `retry_after_seconds` is when to come again."""

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message, code="too_many_requests")
        self.retry_after_seconds = retry_after_seconds


class KeyReused(TokenlineError):
    """An Idempotency-Key came again with another body."""

    kind = common_pb2.ERROR_KIND_INVALID_REQUEST
    http_status = 422


class HandedOver(Unavailable):
    """This gateway shuts down, and the request goes on elsewhere."""

    def __init__(self) -> None:
        super().__init__("This gateway is shutting down; try again.", code="draining")


class ClientDisconnected(RequestCancelled):
    """The client closed its connection before the answer was complete."""

    def __init__(self) -> None:
        super().__init__("The client closed the connection.", code="client_disconnected")


def error_body(error: TokenlineError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`; empty words become null."""
    return {
        "error": {
            "message": shown_message(error),
            "type": _type(error),
            "param": error.param or None,
            "code": error.code or None,
        }
    }


def _type(error: TokenlineError) -> str:
    names = (name for kind, name in _TYPES.items() if isinstance(error, kind))
    return next(names, "invalid_request_error")


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def error_response(error: TokenlineError, path: str) -> Response:
    """The answer to a request of `path`, in the shape that the clients of that path expect."""
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        seconds = RETRY_AFTER_SECONDS
        if isinstance(error, QueueFull):
            seconds = error.retry_after_seconds
        headers = {"retry-after": str(seconds), "retry-after-ms": str(1000 * seconds)}
    is_for_messages = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    body = message_error_body(error) if is_for_messages else error_body(error)
    return json_response(body, error.http_status, headers)


def log_fault(error: TokenlineError) -> None:
    """Logs an error that is not the client's doing."""
    if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.warning("request failed: %s (%s)", error.message, error.code or error.http_status)


def as_typed(error: Exception) -> TokenlineError:
    """`error` as it may be told to a client; what is a fault of ours is logged."""
    if isinstance(error, TokenlineError):
        log_fault(error)
        return error
    logger.error("a request failed", exc_info=error)
    return InternalError("The server failed on this request.")


async def answer_typed_error(request: Request, error: Exception) -> Response:
    """Exception handler for TokenlineError."""
    assert isinstance(error, TokenlineError)
    log_fault(error)
    return error_response(error, request.url.path)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for what Starlette's router raises: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message, code = f"There is nothing at {place}.", "not_found"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        message, code = f"{place} is not allowed; use {allowed}.", "method_not_allowed"
    else:
        message, code = str(error.detail), ""
    body = {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": code or None,
        }
    }
    return json_response(body, error.status_code, dict(error.headers or {}))
