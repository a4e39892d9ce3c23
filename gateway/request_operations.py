"""The operations that tell of requests in the line, for the table in operations.py."""

from collections.abc import Sequence
from typing import Final

from gateway import answer_schema as answers
from gateway.request_events import RequestEvents
from gateway.requests_api import Requests
from gateway.routes import ANY_ERRORS, EVENT_STREAM, Operation

# What the request itself ended with, too.
_EVENTS: Final = (*ANY_ERRORS, 404, 408, 409, 429, 499)


def request_operations(requests: Requests, events: RequestEvents) -> Sequence[Operation]:
    """In the order in which the router tries them."""
    return (
        Operation(
            method="GET",
            path="/v1/requests",
            endpoint=requests.list,
            summary="The requests in progress on every gateway",
            tag="Requests",
            answers={200: answers.RequestList},
            errors=ANY_ERRORS,
        ),
        Operation(
            method="GET",
            path="/v1/requests/{request_id:path}/events",
            endpoint=events.stream,
            summary="The events of a streamed request from the beginning, or after Last-Event-ID",
            tag="Requests",
            answers={200: None},
            media_types=(EVENT_STREAM,),
            errors=_EVENTS,
        ),
        Operation(
            method="GET",
            path="/v1/requests/{request_id:path}",
            endpoint=requests.get,
            summary="How far a request has come, or how it ended",
            tag="Requests",
            answers={200: answers.RequestAnswer},
            errors=(*ANY_ERRORS, 404),
        ),
        Operation(
            method="DELETE",
            path="/v1/requests/{request_id:path}",
            endpoint=requests.cancel,
            summary="Cancel a request, wherever it runs",
            tag="Requests",
            answers={200: answers.RequestAnswer},
            errors=(*ANY_ERRORS, 404),
        ),
    )
