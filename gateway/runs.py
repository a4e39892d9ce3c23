"""The runs that this gateway has, by request id: begins them, and finds those of other gateways."""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gateway.answer_form import AnswerForm
from gateway.call import Call, decode_call
from gateway.errors import HandedOver, KeyReused
from gateway.event_ids import LAST_EVENT_ID, parse_event_id
from gateway.job import Job
from gateway.ledger import Ledger
from gateway.pipeline import Pipeline
from gateway.run import Origin, Run
from gateway.run_store import Claim
from protos.wire.errors import Conflict, InvalidRequest, NotFound, TokenlineError

# A run that has ended stays at hand until its log is surely in Redis.
_LINGER_SECONDS: Final = 5.0

Prepared = tuple[Job, AnswerForm[Any]]
Prepare = Callable[[Call], Awaitable[Prepared]]


class Opened(NamedTuple):
    """A run, how its answer looks, and per choice how far the client has come (empty: nowhere)."""

    run: Run
    form: AnswerForm[Any]
    had: Sequence[int] = ()


class Runs:
    """`endpoints`: how a call of each path is prepared, for those of other gateways."""

    def __init__(self, pipeline: Pipeline, ledger: Ledger) -> None:
        self.endpoints: Mapping[str, Prepare] = {}
        self.draining = False
        self._pipeline = pipeline
        self._ledger = ledger
        self._runs: dict[str, Run] = {}

    async def open(
        self, call: Call, job: Job, form: AnswerForm[Any], last_event_id: str | None = None
    ) -> Opened:
        """The run of a prepared call: a new one, or the one that has its idempotency key already.

        Raises InvalidRequest, KeyReused, Conflict, and Unavailable while a key cannot be claimed.
        """
        if not call.key_digest:
            if last_event_id is not None:
                raise _needs_key()
            return Opened(self._begin(call, job, Origin(incarnation=secrets.token_hex(8))), form)
        had = _had(job, form, last_event_id)
        if self.draining:
            raise HandedOver
        body_digest = hashlib.sha256(call.body).hexdigest()
        claim = await self._ledger.claim(
            call.key_digest, body_digest, call.request_id, call.encode()
        )
        if claim.body_digest != body_digest:
            raise KeyReused(
                "This Idempotency-Key came with another body before; choose a new one for each "
                "request.",
                code="idempotency_key_reused",
                param="idempotency-key",
            )
        if not claim.is_new:
            return await self._attach(claim.request_id, claim, call.tenant, last_event_id)
        try:
            run = self._begin(call, job, Origin(incarnation=claim.incarnation, claim=claim))
        except TokenlineError:
            self._ledger.unclaim(call.key_digest)
            raise
        return Opened(run, form, had)

    async def attach(
        self, request_id: str, tenant: str, last_event_id: str | None = None
    ) -> Opened:
        """The run of a request that is streamed, on whichever gateway.

        Raises NotFound, InvalidRequest, and Unavailable while Redis is away.
        """
        if self.draining:
            raise HandedOver
        return await self._attach(request_id, None, tenant, last_event_id, must_stream=True)

    async def resume(self, request_id: str, tenant: str) -> Opened:
        """As `attach`, for any request."""
        return await self._attach(request_id, None, tenant, None)

    async def is_lost(self, request_id: str) -> bool:
        """Whether no gateway has the request any more. Unavailable while Redis is away."""
        if request_id in self._runs:
            return False
        stored = await self._ledger.find_run(request_id)
        return stored is None or not stored.owner_alive

    def hand_over(self) -> None:
        """Leaves to other gateways what they can go on with."""
        for run in list(self._runs.values()):
            run.hand_over()

    async def close(self) -> None:
        """Ends what still runs."""
        tasks = [run.task for run in self._runs.values()]
        for run in list(self._runs.values()):
            run.stop(HandedOver())
        await asyncio.gather(*tasks, return_exceptions=True)

    def note_refusal(self, endpoint: str) -> None:
        """A request of `endpoint` was wrong before there was a job to run."""
        self._pipeline.note_refusal(endpoint)

    async def _attach(
        self,
        request_id: str,
        claim: Claim | None,
        tenant: str,
        last_event_id: str | None,
        *,
        must_stream: bool = False,
    ) -> Opened:
        run = self._present(request_id)
        stored = None
        if run is None or (claim is not None and run.incarnation != claim.incarnation):
            stored = await self._ledger.find_run(request_id, claim)
            if stored is None:
                raise _unknown(request_id)
            call = decode_call(stored.call)
        else:
            call = run.call
        if call.tenant != tenant:
            raise _unknown(request_id)
        job, form = await self.endpoints[call.endpoint](call)
        if must_stream and not job.streams:
            raise InvalidRequest(
                f"The request `{request_id}` is not streamed, so that it has no events.",
                code="not_streamed",
            )
        had = _had(job, form, last_event_id)
        # Somebody else may have attached meanwhile.
        run = self._present(request_id)
        if stored is not None and (run is None or run.incarnation != stored.incarnation):
            origin = Origin(incarnation=stored.incarnation, claim=claim, stored=stored)
            run = self._add(Run(call, job, origin, self._ledger, self._pipeline))
        if run is None:
            raise _unknown(request_id)
        return Opened(run, form, had)

    def _present(self, request_id: str) -> Run | None:
        """The run as this gateway has it, if it may still be read."""
        run = self._runs.get(request_id)
        return None if run is None or run.is_left else run

    def _begin(self, call: Call, job: Job, origin: Origin) -> Run:
        present = self._runs.get(call.request_id)
        if present is not None and not present.log.ended:
            raise Conflict(
                f"A request with the id `{call.request_id}` is in progress.",
                code="request_id_in_use",
                param="x-request-id",
            )
        return self._add(Run(call, job, origin, self._ledger, self._pipeline))

    def _add(self, run: Run) -> Run:
        self._runs[run.request_id] = run
        run.task.add_done_callback(lambda task: self._forget_later(run))
        return run

    def _forget_later(self, run: Run) -> None:
        linger = _LINGER_SECONDS if run.log.retains and run.log.ended else 0.0
        asyncio.get_running_loop().call_later(linger, self._forget, run)

    def _forget(self, run: Run) -> None:
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]


def _had(job: Job, form: AnswerForm[Any], last_event_id: str | None) -> Sequence[int]:
    if last_event_id is None:
        return ()
    if not (job.streams and form.has_event_ids):
        raise InvalidRequest(
            "The answer has no events with ids to go on from.",
            code="invalid_value",
            param=LAST_EVENT_ID,
        )
    most = job.model.max_model_len + 1
    return parse_event_id(last_event_id, job.num_sequences, most)


def _needs_key() -> InvalidRequest:
    return InvalidRequest(
        "Last-Event-ID needs the Idempotency-Key that the request was sent with.",
        code="invalid_value",
        param=LAST_EVENT_ID,
    )


def _unknown(request_id: str) -> NotFound:
    return NotFound(
        f"There is no request `{request_id}` whose events could be read; they are kept for a while "
        "only.",
        code="request_not_found",
    )
