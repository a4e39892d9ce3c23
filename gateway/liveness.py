"""Which gateways live: each renews a key of its own in Redis, which lapses soon after it."""

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.ledger_keys import LedgerKeys
from gateway.redis_batch import FAILURES, Batch
from gateway.redis_client import AnyRedis
from gateway.redis_state import RedisState

logger = logging.getLogger(__name__)

_TTL_MILLISECONDS: Final = 1500
_RENEW_SECONDS: Final = 0.4
_PLACE_DIGITS: Final = 8


def make_owner(host: str, port: int) -> str:
    """The name of this incarnation of the gateway that listens there: `name:port#random`.

    The random part begins with a digest of where that is (which boot of which machine, which
    network namespace, which address): no two processes listen at one place at the same time, while
    containers may well share a name and a port.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        boot, network = secrets.token_hex(8), 0
    place = hashlib.sha256(f"{boot} {network} {host}".encode()).hexdigest()[:_PLACE_DIGITS]
    return f"{socket.gethostname()}:{port}#{place}{secrets.token_hex(4)}"


def is_earlier_incarnation(owner: str, of: str) -> bool:
    """Whether `owner` listened where `of` does now, and so has ended."""
    return owner != of and _place(owner) == _place(of)


def _place(owner: str) -> str:
    address, _, random = owner.partition("#")
    return f"{address}#{random[:_PLACE_DIGITS]}"


class Liveness:
    """`run` is the task that renews the key. `on_loss` is told when the key was not there any more.

    Then Redis has lost what it held, or this process stood still and others have taken its
    requests.
    """

    def __init__(
        self,
        redis: AnyRedis,
        keys: LedgerKeys,
        owner: str,
        state: RedisState,
        on_loss: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._key = keys.gateway(owner)
        self._state = state
        self._on_loss = on_loss
        self._renewed = False

    async def run(self) -> None:
        while True:
            try:
                await self._renew()
            except FAILURES as error:
                self._state.note_away("liveness", error)
            except Exception:
                logger.exception("the liveness key could not be renewed")
            else:
                self._state.note_there("liveness")
            await asyncio.sleep(_RENEW_SECONDS)

    async def end(self) -> None:
        """Others need not wait until the key lapses."""
        with contextlib.suppress(*FAILURES):
            async with asyncio.timeout(_RENEW_SECONDS):
                await self._redis.delete(self._key)

    async def _renew(self) -> None:
        batch = Batch(self._redis)
        batch.command("EXISTS", self._key)
        batch.command("SET", self._key, "1", "PX", _TTL_MILLISECONDS)
        existed, _ = await batch.execute()
        if self._renewed and not existed:
            self._on_loss()
        self._renewed = True
