"""Streams a response that is generated elsewhere, from the events that are kept of it."""

import time
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientDisconnected
from gateway.interruption import ended_by_disconnect
from gateway.response_store import ResponseStore
from gateway.sse import PING, EventStream
from protos.wire.errors import TokenlineError


class FollowedResponse(Response):
    """The events from number `start` on. Leaving it does not end the response."""

    def __init__(
        self, store: ResponseStore, tenant: str, response_id: str, start: int, ping_seconds: float
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._response_id = response_id
        self._start = start
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        with suppress(ClientDisconnected):
            async with ended_by_disconnect(receive):
                try:
                    await self._follow(stream)
                except TokenlineError:
                    # It was deleted, or Redis is away; the client may ask again from where it is.
                    if not stream.started:
                        raise
                await stream.close(b"")

    async def _follow(self, stream: EventStream) -> None:
        sent_at = time.monotonic()
        async for events in self._store.follow(self._tenant, self._response_id, self._start):
            if events or time.monotonic() - sent_at > self._ping_seconds:
                sent_at = time.monotonic()
                await stream.send(events or PING)
