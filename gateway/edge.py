"""What every HTTP request passes through: its identity, the count of answers, the last resort."""

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import error_response
from gateway.identity import identify
from gateway.metrics import Metrics
from gateway.routes import metric_label
from protos.wire.errors import InternalError
from protos.wire.logs import request_context

logger = logging.getLogger(__name__)


class Edge:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity = identify(headers.get("x-request-id"), headers.get("traceparent", ""))
        scope["state"]["identity"] = identity
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._metrics.note_response(metric_label(scope), message["status"])
                MutableHeaders(scope=message).setdefault("x-request-id", identity.request_id)
            await send(message)

        with request_context(identity.request_id, identity.traceparent):
            try:
                await self._app(scope, receive, send_and_note)
            except Exception:
                logger.exception("%s %s failed", scope["method"], scope["path"])
                if started:
                    raise
                response = error_response(
                    InternalError("The server failed on this request."), scope["path"]
                )
                await response(scope, receive, send_and_note)
