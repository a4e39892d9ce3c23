"""How an endpoint is declared: once, for the router, the metrics and /openapi.json."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from gateway.answer_schema import ErrorAnswer

_CONVERTOR: Final = re.compile(r":[a-z]+(?=\})")

JSON: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream"
# What any route may answer: no key, a head that is too large, a fault, a line that is not ready.
ANY_ERRORS: Final = (400, 401, 431, 500, 503)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path. `path` is Starlette's, such as `/v1/models/{model:path}`.

    `body` is the type of the request's JSON body, `answers` the type of each answer's JSON by
    status; None is for an answer that has no JSON. `media_types` are those of status 200. `errors`
    are further statuses, whose bodies are of the type `error_body`. `parameters` are the types of
    query parameters.
    """

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    summary: str
    tag: str
    body: Any = None
    answers: Mapping[int, Any] = field(default_factory=dict)
    media_types: Sequence[str] = (JSON,)
    errors: Sequence[int] = ()
    error_body: Any = ErrorAnswer
    needs_no_key: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return path_template(self.path)

    def route(self) -> Route:
        return Route(self.path, self.endpoint, methods=[self.method])


def path_template(path: str) -> str:
    """`/v1/models/{model:path}` without the kinds of its parameters."""
    return _CONVERTOR.sub("", path)


def metric_label(scope: Scope) -> str:
    """The path of the route that was taken; "other" where there is none."""
    route: BaseRoute | None = scope.get("route")
    return path_template(route.path) if isinstance(route, Route) else "other"
