"""Commands and scripts that go to Redis in one round trip."""

import hashlib
from typing import Any, Final

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import (
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from gateway.redis_client import AnyRedis

# What Redis away looks like. A RuntimeError is uvloop's word for writing to a connection that was
# reset, which redis-py passes on as it is.
FAILURES: Final = (RedisError, RedisClusterException, OSError, TimeoutError, RuntimeError)


class Script:
    """A Lua script of one key, which Redis runs as one step; what it has forgotten is sent anew."""

    def __init__(self, source: str) -> None:
        self.source = source
        # Redis names scripts so.
        self.digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class WrongType(RedisError):
    """The result of a command whose key holds something else, which others wrote."""


class Batch:
    """Not a transaction: other clients' commands may come between.

    In a Cluster the keys may lie anywhere, and the commands for one node run in order.
    """

    def __init__(self, redis: AnyRedis) -> None:
        self._redis = redis
        self._commands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        # By the place of their call.
        self._scripts: dict[int, Script] = {}
        self._messages: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._commands)

    def command(self, *arguments: Any, binary: bool = False) -> None:
        """binary: its reply is bytes, not text."""
        self._commands.append((arguments, {"NEVER_DECODE": True} if binary else {}))

    def script(self, script: Script, key: str, *arguments: Any) -> None:
        self._scripts[len(self._commands)] = script
        self._commands.append((("EVALSHA", script.digest, 1, key, *arguments), {}))

    def publish(self, channel: str, message: str) -> None:
        """To who listens, once the commands before are done."""
        if isinstance(self._redis, RedisCluster):
            # Its pipelines have no place for a command without a key.
            self._messages.append((channel, message))
        else:
            self.command("PUBLISH", channel, message)

    async def execute(self) -> list[Any]:
        """The replies in order; a WrongType in the place of one is the only error among them.

        Raises one of FAILURES for anything else, after which any part may have been done.
        """
        if not self._commands:
            return []
        replies = await self._send(range(len(self._commands)))
        forgotten = [place for place, reply in replies.items() if isinstance(reply, NoScriptError)]
        if forgotten:
            for place in forgotten:
                arguments, options = self._commands[place]
                source = self._scripts[place].source
                self._commands[place] = (("EVAL", source, *arguments[2:]), options)
            replies.update(await self._send(forgotten))
        checked = [await self._checked(replies[place]) for place in range(len(self._commands))]
        for channel, message in self._messages:
            await self._redis.publish(channel, message)
        return checked

    async def _send(self, places: Any) -> dict[int, Any]:
        pipeline: Any = self._redis.pipeline(transaction=False)
        for place in places:
            arguments, options = self._commands[place]
            pipeline.execute_command(*arguments, **options)
        return dict(zip(places, await pipeline.execute(raise_on_error=False), strict=True))

    async def _checked(self, reply: Any) -> Any:
        if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
            return WrongType(str(reply))
        if isinstance(reply, ReadOnlyError) and isinstance(self._redis, Redis):
            # The name may lead to another server by now, which new connections find.
            await self._redis.connection_pool.disconnect(inuse_connections=False)
        if isinstance(reply, BaseException):
            raise reply
        return reply
