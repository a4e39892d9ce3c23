"""Is the process alive, is the line ready, what do the numbers say, what is this at all."""

from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission import Admission
from gateway.errors import json_response
from gateway.lanes import Lanes
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.routes import path_template


class Health:
    """The endpoints /, /healthz, /readyz and /metrics."""

    def __init__(
        self, lanes: Lanes, admission: Admission, ledger: Ledger, metrics: Metrics
    ) -> None:
        self._lanes = lanes
        self._admission = admission
        self._ledger = ledger
        self._metrics = metrics

    async def about(self, request: Request) -> Response:
        """GET /"""
        return json_response(
            {
                "name": "tokenline",
                "version": version("tokenline"),
                "endpoints": sorted({path_template(route.path) for route in request.app.routes}),
            }
        )

    async def healthz(self, request: Request) -> Response:
        """200 while the event loop turns."""
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """200 when requests can be served, else 503; the body says what is missing.

        Redis is not needed to serve requests, so it is reported but not required.
        """
        missing = self._lanes.missing()
        if self._admission.draining:
            missing.append("this gateway is draining")
        body = {
            "ready": not missing,
            "message": "; ".join(missing),
            "missing": missing,
            "model": self._lanes.model().name if self._lanes.ready else None,
            **self._lanes.describe(),
            "redis": "connected" if self._ledger.available else "away",
            "live_requests": len(self._admission.records()),
        }
        return json_response(body, 503 if missing else 200)

    async def metrics(self, request: Request) -> Response:
        """The Prometheus text format."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
