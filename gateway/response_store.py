"""The responses that are kept: in Redis, so that any gateway serves them, for a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from gateway.redis_batch import FAILURES
from gateway.redis_client import AnyRedis
from protos.wire.errors import NotFound, Unavailable

# How often one who follows a response looks for more of it.
_POLL_SECONDS: Final = 0.05


class StoredResponse(msgspec.Struct, kw_only=True):
    """`response` is the API's object. `messages` are the chat up to and with it, without the
    instructions, which hold for one response only. `request_id` is what it is cancelled by.
    """

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    request_id: str
    # Whether its events are kept, too.
    has_events: bool = False

    @property
    def is_live(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")


_decoder: Final = msgspec.json.Decoder(StoredResponse)


class ResponseStore:
    """Every method raises Unavailable while Redis is away. Tenants see their own responses only."""

    def __init__(self, redis: AnyRedis, prefix: str, ttl_seconds: int) -> None:
        self._redis = redis
        self._prefix = prefix
        self._ttl_seconds = ttl_seconds

    async def save(self, tenant: str, stored: StoredResponse) -> None:
        key = self._key(tenant, stored.response["id"])
        async with _unavailable_when_away():
            await self._redis.set(key, msgspec.json.encode(stored).decode(), ex=self._ttl_seconds)

    async def find(self, tenant: str, response_id: str, param: str = "") -> StoredResponse:
        """Raises NotFound; `param` is the field that named it."""
        async with _unavailable_when_away():
            raw: Any = await self._redis.get(self._key(tenant, response_id))
        if raw is None:
            raise NotFound(
                f"There is no response `{response_id}`; responses are kept for a while only.",
                code="response_not_found",
                param=param,
            )
        return _decoder.decode(raw)

    async def delete(self, tenant: str, response_id: str) -> None:
        key = self._key(tenant, response_id)
        async with _unavailable_when_away():
            await self._redis.delete(key)
            await self._redis.delete(self._events_key(key))

    async def append_events(self, tenant: str, response_id: str, events: bytes) -> None:
        """Keeps whole events, which follow those kept already."""
        key = self._events_key(self._key(tenant, response_id))
        parts = [part + "\n\n" for part in events.decode().split("\n\n") if part]
        if not parts:
            return
        async with _unavailable_when_away():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.rpush(key, *parts)
            pipeline.expire(key, self._ttl_seconds)
            await pipeline.execute()

    async def num_events(self, tenant: str, response_id: str) -> int:
        """How many events are kept."""
        async with _unavailable_when_away():
            number: Any = await self._redis.llen(self._events_key(self._key(tenant, response_id)))
        return int(number)

    async def follow(self, tenant: str, response_id: str, start: int) -> AsyncIterator[bytes]:
        """The events from number `start` on, as they come, until the response has ended.

        Empty bytes while there is nothing new.
        """
        key = self._events_key(self._key(tenant, response_id))
        while True:
            # Looked up first: what was kept before its end is then seen by the read after it.
            is_live = (await self.find(tenant, response_id)).is_live
            async with _unavailable_when_away():
                events: Any = await self._redis.lrange(key, start, -1)
            start += len(events)
            yield "".join(events).encode()
            if not is_live:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _key(self, tenant: str, response_id: str) -> str:
        return f"{self._prefix}response:{tenant}:{response_id}"

    def _events_key(self, key: str) -> str:
        return f"{key}:events"


@asynccontextmanager
async def _unavailable_when_away() -> AsyncIterator[None]:
    try:
        yield
    except FAILURES as error:
        raise Unavailable(
            "The store of responses (Redis) cannot be reached now; try again.",
            code="response_store_unavailable",
        ) from error
