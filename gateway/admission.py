"""Who may come in: bounded requests, one per id, none while draining; who is in, and whose turn."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from gateway.cancel_channel import is_meant
from gateway.job import Job
from gateway.live_request import LiveRequest
from gateway.metrics import Metrics
from gateway.queue_bounds import with_reserve
from gateway.records import RequestRecord
from gateway.seat import Seat
from gateway.visit import Visit
from gateway.waiting_room import WaitingRoom
from protos.wire.errors import Conflict, InternalError, TokenlineError, Unavailable


class Admission:
    """Owner of the live requests of this gateway. `save` is told when a record has moved."""

    def __init__(
        self,
        owner: str,
        max_live_requests: int,
        waiting_room: WaitingRoom,
        metrics: Metrics,
        save: Callable[[RequestRecord], None],
    ) -> None:
        self.draining = False
        self._owner = owner
        self._max_live_requests = max_live_requests
        self._waiting_room = waiting_room
        self._metrics = metrics
        self._save = save
        self._live: dict[str, LiveRequest] = {}
        self._visits: dict[str, Visit] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def find(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def records(self) -> list[RequestRecord]:
        """Of all live requests."""
        return [request.record for request in self._live.values()]

    @contextmanager
    def admit(self, job: Job, seat: Seat) -> Iterator[LiveRequest]:
        """The request is live inside the block, and its finish is recorded however that ends.

        The block sets the finish reason of a plain end. Raises Unavailable, QueueFull or Conflict.
        """
        visit = self._come_in(job, seat)
        request = LiveRequest(self._record(job, seat), self._metrics, self._save)
        self._live[request.id] = request
        self._visits[request.id] = visit
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
            del self._live[request.id], self._visits[request.id]
            self._waiting_room.leave(visit, request.record)
            if not self._live:
                self._empty.set()

    @asynccontextmanager
    async def turn(
        self, request: LiveRequest, num_prompt_tokens: int, max_tokens: int
    ) -> AsyncIterator[None]:
        """Waits until it is the turn of an admitted request; the block is to start its sequences.

        num_prompt_tokens, max_tokens: of all its sequences together. Raises QueueFull,
        RequestTimeout, RequestCancelled or Unavailable.
        """
        visit = self._visits[request.id]
        async with self._waiting_room.turn(visit, request, num_prompt_tokens, max_tokens):
            yield

    def cancel(self, request_id: str, incarnation: str) -> None:
        """Cancels a live request, if `incarnation`, as in a cancel's message, means it."""
        request = self._live.get(request_id)
        if request is not None and is_meant(request.record, incarnation):
            request.cancel()

    def cancel_all(self) -> None:
        for request in list(self._live.values()):
            request.cancel()

    async def until_empty(self) -> None:
        await self._empty.wait()

    def _record(self, job: Job, seat: Seat) -> RequestRecord:
        if seat.taken is not None:
            return seat.taken.taken_over(self._owner, seat.epoch)
        return RequestRecord(
            id=job.request_id,
            incarnation=seat.incarnation,
            epoch=seat.epoch,
            owner=self._owner,
            endpoint=job.endpoint,
            model=job.model.name,
            seed=job.seed,
            num_choices=job.num_sequences,
            tenant=job.tenant,
        )

    def _come_in(self, job: Job, seat: Seat) -> Visit:
        goes_on = seat.is_owed
        if self.draining and not goes_on:
            raise Unavailable("This gateway is shutting down; try again.", code="draining")
        if job.request_id in self._live:
            raise Conflict(
                f"A request with the id `{job.request_id}` is in progress.",
                code="request_id_in_use",
                param="x-request-id",
            )
        visit = self._waiting_room.visit(job, goes_on=goes_on)
        limit = self._max_live_requests
        limit = with_reserve(limit) if visit.is_promised else limit
        if len(self._live) >= limit and not goes_on:
            raise self._waiting_room.refusal(visit, "live_requests")
        self._waiting_room.come_in(visit)
        return visit
