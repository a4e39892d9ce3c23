"""Typed errors, and their one mapping to gRPC statuses, HTTP statuses and the wire.

A user error is raised once, at the edge that notices it, as one of the classes below. It travels
as a gRPC status with a `common.v1.Error` in the trailing metadata (unary calls) or inside
`Finish.error` (streams), and is the same class again on the other side.
"""

from typing import ClassVar

import grpc

from protos.common.v1 import common_pb2

ERROR_METADATA_KEY = "tokenline-error-bin"


class StartupError(Exception):
    """A service cannot start, for a cause that a restart does not mend. One line, for people."""


class TokenlineError(Exception):
    """Base of the errors that may reach a user.

    `message` is a sentence for people, `code` a stable word for programs, `param` the request field
    at fault; the last two may be empty.
    """

    kind: ClassVar[common_pb2.ErrorKind.ValueType] = common_pb2.ERROR_KIND_INTERNAL
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidRequest(TokenlineError):
    """The request itself is wrong; sending it again will not help."""

    kind = common_pb2.ERROR_KIND_INVALID_REQUEST
    http_status = 400
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(TokenlineError):
    """What the request names does not exist."""

    kind = common_pb2.ERROR_KIND_NOT_FOUND
    http_status = 404
    grpc_status = grpc.StatusCode.NOT_FOUND


class Conflict(TokenlineError):
    """The request contradicts something that exists, such as a live request of the same id."""

    kind = common_pb2.ERROR_KIND_CONFLICT
    http_status = 409
    grpc_status = grpc.StatusCode.ALREADY_EXISTS


class TooLarge(TokenlineError):
    """The request's body is over a configured limit."""

    kind = common_pb2.ERROR_KIND_TOO_LARGE
    http_status = 413
    grpc_status = grpc.StatusCode.OUT_OF_RANGE


class Overloaded(TokenlineError):
    """There is too much work already; the same request can succeed later."""

    kind = common_pb2.ERROR_KIND_OVERLOADED
    http_status = 429
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(TokenlineError):
    """A service that the request needs is not there now."""

    kind = common_pb2.ERROR_KIND_UNAVAILABLE
    http_status = 503
    grpc_status = grpc.StatusCode.UNAVAILABLE


class RequestTimeout(TokenlineError):
    """The request's time ran out before its first token."""

    kind = common_pb2.ERROR_KIND_TIMEOUT
    http_status = 408
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelled(TokenlineError):
    """The request was cancelled before it had an answer."""

    kind = common_pb2.ERROR_KIND_CANCELLED
    http_status = 499
    grpc_status = grpc.StatusCode.CANCELLED


class InternalError(TokenlineError):
    """A fault of ours. The message says nothing of the cause; the log does."""


_CLASSES: tuple[type[TokenlineError], ...] = (
    InvalidRequest,
    NotFound,
    Conflict,
    TooLarge,
    Overloaded,
    Unavailable,
    RequestTimeout,
    RequestCancelled,
    InternalError,
)
_BY_KIND = {cls.kind: cls for cls in _CLASSES}
_BY_GRPC_STATUS = {cls.grpc_status: cls for cls in _CLASSES}


def to_proto(error: TokenlineError) -> common_pb2.Error:
    return common_pb2.Error(
        kind=error.kind, code=error.code, message=error.message, param=error.param
    )


def from_proto(error: common_pb2.Error) -> TokenlineError:
    """The typed error again; a kind this build does not know becomes InternalError."""
    cls = _BY_KIND.get(error.kind, InternalError)
    return cls(error.message, code=error.code, param=error.param)


def from_rpc_error(error: grpc.aio.AioRpcError) -> TokenlineError:
    """The typed error that a wire server attached to a failed call.

    Failures that gRPC itself made (no connection, message over the limit) carry none and are
    mapped by their status, with a message fit for users.
    """
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            return from_proto(common_pb2.Error.FromString(value))
    status = error.code()
    if status == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return TooLarge("A message between services is over the configured size limit.")
    cls = _BY_GRPC_STATUS.get(status, InternalError)
    if cls is Unavailable:
        return Unavailable("A service that this request needs cannot be reached; try again.")
    return cls(f"A call between services failed with status {status.name}.")
