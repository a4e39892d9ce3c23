"""Waits until every gateway of a line says that it is ready, and tells what is missing."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx2

_POLL_SECONDS: Final = 0.1
_ANSWER_SECONDS: Final = 5.0
# Requests are served without Redis, so a line does not wait for it longer than this.
_REDIS_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Readiness:
    """What a line that is ready serves; `has_redis`: whether all its gateways reach Redis."""

    model: str
    has_redis: bool


@dataclass(frozen=True)
class _Look:
    """What one gateway says: `missing` in words, empty when there is nothing."""

    missing: str
    model: str = ""
    has_redis: bool = False


async def wait_until_ready(
    urls: Sequence[str],
    num_replicas: Mapping[str, int],
    on_status: Callable[[str], None],
    redis_seconds: float = _REDIS_SECONDS,
) -> Readiness:
    """Waits until each of `urls` is ready, with all the replicas of `num_replicas`.

    `num_replicas` has the number of each role as `/readyz` calls it: `engines` and so on. A ready
    gateway without Redis is given `redis_seconds` more. `on_status` gets a few words on what is
    still missing, whenever they change. Else there is no time limit: a large model loads for
    minutes, and the supervisor notices what has crashed.
    """
    last_status = ""
    look = _Look("")
    has_redis = True
    async with httpx2.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False) as client:
        for url in urls:
            ready_since: float | None = None
            while True:
                look = await _look(client, url, num_replicas)
                if not look.missing:
                    ready_since = ready_since or time.monotonic()
                    if look.has_redis or time.monotonic() - ready_since >= redis_seconds:
                        break
                status = f"waiting: {look.missing or 'Redis is away'}"
                if status != last_status:
                    on_status(status)
                    last_status = status
                await asyncio.sleep(_POLL_SECONDS)
            has_redis = has_redis and look.has_redis
    return Readiness(look.model, has_redis)


async def _look(client: httpx2.AsyncClient, url: str, num_replicas: Mapping[str, int]) -> _Look:
    try:
        answer = await client.get(f"{url}/readyz")
        body = answer.json()
    except (httpx2.HTTPError, ValueError):
        return _Look("the gateway does not answer yet")
    if answer.status_code != 200:
        return _Look("; ".join(body["missing"]))
    lacking = [
        f"{num_ready} of {number} {role} ready"
        for role, number in num_replicas.items()
        if (num_ready := _num_ready(body[role])) < number
    ]
    return _Look("; ".join(lacking), str(body["model"]), body["redis"] == "connected")


def _num_ready(replicas: Sequence[Mapping[str, Any]]) -> int:
    return sum(replica["ready"] for replica in replicas)
