"""GET and DELETE /v1/requests/{id}, GET /v1/requests: what requests are in the line, and cancel."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.admission import Admission
from gateway.errors import json_response
from gateway.identity import Identity, candidate_ids
from gateway.ledger import Ledger
from gateway.records import RequestRecord
from protos.wire.errors import NotFound


class Requests:
    """The endpoints. Any gateway answers for requests of all; an answer's `id` works as well.

    With API keys, each sees and cancels only its own requests.
    """

    def __init__(self, admission: Admission, ledger: Ledger) -> None:
        self._admission = admission
        self._ledger = ledger

    async def list(self, request: Request) -> Response:
        """Live requests of the whole line, oldest first. Unavailable while Redis is away."""
        tenant = _tenant_of(request)
        records = {record.id: record for record in await self._ledger.list_live()}
        records.update((record.id, record) for record in self._admission.records())
        own = [record for record in records.values() if record.tenant == tenant]
        data = sorted(own, key=lambda record: record.preprocessing_at or 0.0)
        return json_response({"object": "list", "data": [record.to_json() for record in data]})

    async def get(self, request: Request) -> Response:
        """The record of a live or finished request."""
        request_id = request.path_params["request_id"]
        for candidate in candidate_ids(request_id):
            record = self._own(candidate) or await self._ledger.find(candidate)
            if record is not None and record.tenant == _tenant_of(request):
                return json_response(record.to_json())
        raise _unknown(request_id)

    async def cancel(self, request: Request) -> Response:
        """Cancels a request wherever it runs. Of one that has finished, says how it ended."""
        record = await self.cancel_by_id(request.path_params["request_id"], _tenant_of(request))
        return json_response({**record.to_json(), "cancel_requested": record.is_live})

    async def cancel_by_id(self, request_id: str, tenant: str) -> RequestRecord:
        """Cancels a request; its record as it was then. Raises NotFound and Unavailable."""
        for candidate in candidate_ids(request_id):
            record = self._own(candidate) or await self._ledger.find(candidate)
            if record is None or record.tenant != tenant:
                continue
            live = self._admission.find(candidate)
            if live is not None:
                live.cancel()
            elif record.is_live:
                await self._ledger.request_cancel(record)
            return record
        # It may have begun on another gateway a moment ago, and not be in the ledger yet.
        await self._ledger.request_cancel_soon(candidate_ids(request_id), tenant)
        raise _unknown(request_id)

    def _own(self, request_id: str) -> RequestRecord | None:
        live = self._admission.find(request_id)
        return live.record if live is not None else None


def _tenant_of(request: Request) -> str:
    identity: Identity = request.state.identity
    return identity.tenant


def _unknown(request_id: str) -> NotFound:
    return NotFound(
        f"There is no request `{request_id}`; records of finished requests are kept for a while "
        "only.",
        code="request_not_found",
    )
