"""Counts the requests that an endpoint refuses before they are live."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.runs import Runs
from protos.wire.errors import InvalidRequest


class _Generating(Protocol):
    _runs: Runs


EndpointT = TypeVar("EndpointT", bound=_Generating)
_Create = Callable[[EndpointT, Request], Awaitable[Response]]


def counts_refusals(path: str) -> Callable[[_Create[EndpointT]], _Create[EndpointT]]:
    """For the method that makes the response of the endpoint at `path`.

    Those that are refused once they are live are counted there: to who watches the counts it is all
    the same how far a request that is wrong has come.
    """

    def decorate(create: _Create[EndpointT]) -> _Create[EndpointT]:
        @wraps(create)
        async def counted(endpoint: EndpointT, request: Request) -> Response:
            try:
                return await create(endpoint, request)
            except InvalidRequest:
                endpoint._runs.note_refusal(path)
                raise

        return counted

    return decorate
