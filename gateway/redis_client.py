"""A Redis client from a URL: one server, a Sentinel group or a Cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from protos.wire.errors import StartupError

# A hung server must not hold up what waits for it: lookups answer 503 after this long.
TIMEOUT_SECONDS: Final = 0.9
_MAX_RETRIES: Final = 3
_DEFAULT_PORT: Final = 6379
_DEFAULT_SENTINEL_PORT: Final = 26379

# A RuntimeError is uvloop's word for writing to a connection that was reset, and redis-py lets it
# pass: of 48 callers at the moment of a reset, 12 failed with it.
_LOST_CONNECTION: Final[Any] = (RedisConnectionError, RuntimeError)

AnyRedis = Redis | RedisCluster


@asynccontextmanager
async def open_redis(url: str) -> AsyncIterator[AnyRedis]:
    """A client that connects when first used. Raises StartupError on a URL it cannot read."""
    try:
        client, others = _make_clients(url)
    except (ValueError, RedisError) as error:
        raise StartupError(f"cannot use the Redis URL {_without_password(url)}: {error}") from error
    try:
        yield client
    finally:
        for opened in (client, *others):
            await opened.aclose()


def _make_clients(url: str) -> tuple[AnyRedis, list[Redis]]:
    """The client, and those that it needs to find its server."""
    parts = urlsplit(url)
    if parts.scheme == "redis+sentinel":
        return _make_sentinel_client(parts)
    if parts.scheme == "redis+cluster":
        host, port = parts.hostname or "127.0.0.1", parts.port or _DEFAULT_PORT
        return RedisCluster(host=host, port=port, **_credentials(parts), **_options()), []
    return Redis.from_url(url, **_options()), []


def _make_sentinel_client(parts: SplitResult) -> tuple[Redis, list[Redis]]:
    """`redis+sentinel://[user:password@]host:port[,host:port…]/master[/database]`."""
    sentinels = []
    for address in parts.netloc.rpartition("@")[2].split(","):
        host, _, port = address.partition(":")
        sentinels.append((host, int(port or _DEFAULT_SENTINEL_PORT)))
    master, _, database = parts.path.strip("/").partition("/")
    if not master:
        raise ValueError("name the master: redis+sentinel://host:port/master")
    group: Any = Sentinel(sentinels, sentinel_kwargs=_options())  # type: ignore[no-untyped-call]
    options = {"db": int(database or 0), **_credentials(parts), **_options()}
    return group.master_for(master, **options), group.sentinels


def _options() -> dict[str, Any]:
    return {
        "decode_responses": True,
        # Redis 6 and Valkey speak it alike; push messages of RESP3 are not needed.
        "protocol": 2,
        "socket_timeout": TIMEOUT_SECONDS,
        "socket_connect_timeout": TIMEOUT_SECONDS,
        # At once, for a pooled connection that the server has closed meanwhile, and for the new one
        # if that goes the same way.
        "retry": Retry(NoBackoff(), _MAX_RETRIES, supported_errors=_LOST_CONNECTION),
    }


def _credentials(parts: SplitResult) -> dict[str, Any]:
    return {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
