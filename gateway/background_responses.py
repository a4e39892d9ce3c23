"""Responses that go on in the background, answered into the store, and those that were left."""

import asyncio
import logging
import time
from typing import Final

import msgspec
from starlette.types import Message

from gateway.answers import StreamedAnswer
from gateway.errors import HandedOver, as_typed
from gateway.response_builder import ResponseBuilder
from gateway.response_form import ResponseForm
from gateway.response_store import ResponseStore, StoredResponse
from gateway.runs import Opened, Runs
from gateway.sse import EventStream
from protos.wire.errors import NotFound, Unavailable

logger = logging.getLogger(__name__)

# A response that is younger may not be in Redis wholly.
_BEGINNING_SECONDS: Final = 5.0
_LOST: Final = "The gateway that generated the response is gone; create it again."


class BackgroundResponses:
    """`close` ends those of this gateway."""

    def __init__(self, runs: Runs, store: ResponseStore, ping_seconds: float) -> None:
        self._runs = runs
        self._store = store
        self._ping_seconds = ping_seconds
        self._in_background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._in_background:
            task.cancel()
        await asyncio.gather(*self._in_background, return_exceptions=True)

    async def look_after(self, tenant: str, stored: StoredResponse) -> None:
        """Of a response that is not complete: revives it where its gateway is gone."""
        age_seconds = time.time() - stored.response["created_at"]
        if age_seconds > _BEGINNING_SECONDS and await self._runs.is_lost(stored.request_id):
            await self._revive(tenant, stored)

    def begin(
        self, opened: Opened, form: ResponseForm, tenant: str, stored: StoredResponse
    ) -> None:
        """Answers into the store, whoever reads."""
        task = asyncio.create_task(self._run(opened, form, tenant, stored))
        self._in_background.add(task)
        task.add_done_callback(self._in_background.discard)

    async def _run(
        self, opened: Opened, form: ResponseForm, tenant: str, stored: StoredResponse
    ) -> None:
        """Answers into the store. Whoever asked learns of errors from there."""
        response_id = stored.response["id"]

        async def send(message: Message) -> None:
            events = message.get("body", b"")
            if stored.has_events and events != form.ping:
                await self._store.append_events(tenant, response_id, events)

        stream = EventStream(send)
        try:
            try:
                with opened.run.being_read():
                    await StreamedAnswer(opened, self._ping_seconds).answer(stream)
            except HandedOver:
                return
            except Exception as error:
                await stream.close(form.failure_events(as_typed(error)))
            if stored.response["status"] in ("failed", "cancelled"):
                await self._store.save(tenant, stored)
        except Unavailable as error:
            logger.warning("the response %s is lost: %s", response_id, error.message)

    async def _revive(self, tenant: str, stored: StoredResponse) -> None:
        """Goes on with a response whose gateway is gone, or tells that it has failed."""
        try:
            if stored.has_events:
                # Events that were kept cannot be told from those that would come again.
                raise Unavailable(_LOST, code="gateway_lost")
            opened = await self._runs.resume(stored.request_id, tenant)
        except (NotFound, Unavailable) as error:
            lost = Unavailable(_LOST, code="gateway_lost")
            if isinstance(error, Unavailable) and error.code != lost.code:
                raise
            number = await self._store.num_events(tenant, stored.response["id"])
            builder = ResponseBuilder(stored.response, number)
            builder.fail(lost)
            if stored.has_events:
                await self._store.append_events(tenant, stored.response["id"], builder.last_event())
            await self._store.save(tenant, stored)
            return
        assert isinstance(opened.form, ResponseForm)
        revived = msgspec.structs.replace(stored, response=opened.form.response)
        self.begin(opened, opened.form, tenant, revived)
