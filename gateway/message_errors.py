"""Errors in the shape of Anthropic's Messages API."""

from http import HTTPStatus
from typing import Any, Final

from protos.wire.errors import TokenlineError

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# Messages may quote what a client sent.
_MAX_MESSAGE_CHARACTERS: Final = 2000


def shown_message(error: TokenlineError) -> str:
    """The message, cut where it is too long for anyone to read."""
    message = error.message
    if len(message) <= _MAX_MESSAGE_CHARACTERS:
        return message
    return f"{message[:_MAX_MESSAGE_CHARACTERS]}…"


def message_error_body(error: TokenlineError) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}}`; the message names the field at fault."""
    message = shown_message(error)
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": _type(error.http_status), "message": message}}


def _type(status: int) -> str:
    is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return _TYPES.get(status, "api_error" if is_ours else "invalid_request_error")
