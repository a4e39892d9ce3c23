"""GET /v1/requests/{id}/events: goes on with a stream that broke, through any gateway."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import StreamedAnswer
from gateway.event_ids import LAST_EVENT_ID
from gateway.identity import Identity, candidate_ids
from gateway.runs import Opened, Runs
from protos.wire.errors import NotFound


class RequestEvents:
    """The endpoint. With Last-Event-ID, what follows that event; without, everything again."""

    def __init__(self, runs: Runs, ping_seconds: float) -> None:
        self._runs = runs
        self._ping_seconds = ping_seconds

    async def stream(self, request: Request) -> Response:
        """Of the tenant's own requests only. Unavailable while Redis is away."""
        return StreamedAnswer(await self._attach(request), self._ping_seconds)

    async def _attach(self, request: Request) -> Opened:
        identity: Identity = request.state.identity
        last_event_id = request.headers.get(LAST_EVENT_ID)
        *others, last = candidate_ids(request.path_params["request_id"])
        for candidate in others:
            try:
                return await self._runs.attach(candidate, identity.tenant, last_event_id)
            except NotFound:
                continue
        return await self._runs.attach(last, identity.tenant, last_event_id)
