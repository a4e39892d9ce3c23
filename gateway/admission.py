"""Who may come in: bounded live requests, one per id, none while draining; and who is in."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.job import Job
from gateway.live_request import LiveRequest
from gateway.metrics import Metrics
from gateway.records import RequestRecord
from protos.wire.errors import (
    Conflict,
    InternalError,
    Overloaded,
    TokenlineError,
    Unavailable,
)


class Admission:
    """Owner of the live requests of this gateway. `save` is told when a record has moved."""

    def __init__(
        self,
        owner: str,
        max_live_requests: int,
        metrics: Metrics,
        save: Callable[[RequestRecord], None],
    ) -> None:
        self.draining = False
        self._owner = owner
        self._max_live_requests = max_live_requests
        self._metrics = metrics
        self._save = save
        self._live: dict[str, LiveRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def find(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def records(self) -> list[RequestRecord]:
        """Of all live requests."""
        return [request.record for request in self._live.values()]

    @contextmanager
    def admit(self, job: Job) -> Iterator[LiveRequest]:
        """The request is live inside the block, and its finish is recorded however that ends.

        The block sets the finish reason of a plain end. Raises Unavailable, Overloaded or Conflict.
        """
        self._check(job.request_id)
        record = RequestRecord(
            id=job.request_id,
            incarnation=secrets.token_hex(8),
            owner=self._owner,
            endpoint=job.endpoint,
            model=job.model.name,
            seed=job.seed,
            num_choices=job.num_sequences,
        )
        request = LiveRequest(record, self._metrics, self._save)
        self._live[request.id] = request
        self._empty.clear()
        try:
            yield request
        except TokenlineError as error:
            request.fail(error)
            raise
        except Exception:
            request.fail(InternalError("The gateway failed on this request; see its log."))
            raise
        finally:
            # What is left has neither ended nor failed: the client went, or the gateway stops.
            request.finish("cancelled")
            del self._live[request.id]
            if not self._live:
                self._empty.set()

    def cancel(self, request_id: str, incarnation: str | None) -> None:
        """Cancels a live request; `incarnation` None means whichever has the id."""
        request = self._live.get(request_id)
        if request is not None and incarnation in (None, request.record.incarnation):
            request.cancel()

    def cancel_all(self) -> None:
        for request in list(self._live.values()):
            request.cancel()

    async def until_empty(self) -> None:
        await self._empty.wait()

    def _check(self, request_id: str) -> None:
        if self.draining:
            raise Unavailable("This gateway is shutting down; try again.", code="draining")
        if len(self._live) >= self._max_live_requests:
            raise Overloaded(
                f"{len(self._live)} requests are in progress, which is the limit; try again later.",
                code="too_many_requests",
            )
        if request_id in self._live:
            raise Conflict(
                f"A request with the id `{request_id}` is in progress.",
                code="request_id_in_use",
                param="x-request-id",
            )
