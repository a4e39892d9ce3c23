"""A Redis client from a URL: one server, a Sentinel group or a Cluster."""

from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from protos.wire.errors import StartupError

# A hung server must not hold up what waits for it: lookups answer 503 after this long.
TIMEOUT_SECONDS: Final = 2.0
_DEFAULT_PORT: Final = 6379
_DEFAULT_SENTINEL_PORT: Final = 26379

AnyRedis = Redis | RedisCluster


def open_redis(url: str) -> AnyRedis:
    """A client that connects when first used. Raises StartupError on a URL it cannot read."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "redis+cluster":
            return RedisCluster(
                host=parts.hostname or "127.0.0.1",
                port=parts.port or _DEFAULT_PORT,
                **_credentials(parts),
                **_options(),
            )
        if parts.scheme == "redis+sentinel":
            return _open_sentinel(parts)
        return Redis.from_url(url, **_options())
    except (ValueError, RedisError) as error:
        raise StartupError(f"cannot use the Redis URL {_without_password(url)}: {error}") from error


def _open_sentinel(parts: SplitResult) -> Redis:
    """`redis+sentinel://[user:password@]host:port[,host:port…]/master[/database]`."""
    hosts = parts.netloc.rpartition("@")[2].split(",")
    sentinels = []
    for host in hosts:
        name, _, port = host.partition(":")
        sentinels.append((name, int(port or _DEFAULT_SENTINEL_PORT)))
    master, _, database = parts.path.strip("/").partition("/")
    if not master:
        raise ValueError("name the master: redis+sentinel://host:port/master")
    group: Any = Sentinel(sentinels, sentinel_kwargs=_options())  # type: ignore[no-untyped-call]
    client: Redis = group.master_for(
        master, db=int(database or 0), **_credentials(parts), **_options()
    )
    return client


def _options() -> dict[str, Any]:
    return {
        "decode_responses": True,
        # Redis 6 and Valkey speak it alike; push messages of RESP3 are not needed.
        "protocol": 2,
        "socket_timeout": TIMEOUT_SECONDS,
        "socket_connect_timeout": TIMEOUT_SECONDS,
        # Once more at once, for a pooled connection that the server has closed meanwhile.
        "retry": Retry(NoBackoff(), 1),
    }


def _credentials(parts: SplitResult) -> dict[str, Any]:
    return {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
