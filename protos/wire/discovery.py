"""Which addresses stand behind `host:port[,host:port…]`, now: a host name may have many."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)


class AddressSet:
    """The addresses of a service's replicas; host names are resolved again every few seconds.

    docker compose `--scale` and Kubernetes headless services answer a host name with one address
    per replica. A name that does not resolve keeps the addresses it had, so that a hiccup of the
    name server takes nothing away. `changed` is set whenever the addresses are others than before.
    Use as an async context manager.
    """

    def __init__(self, targets: Sequence[str], refresh_seconds: float = 3.0) -> None:
        self._by_target: dict[str, frozenset[str]] = {target: frozenset() for target in targets}
        self._refresh_seconds = refresh_seconds
        self._unresolved: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset().union(*self._by_target.values())

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._task = asyncio.create_task(self._keep_fresh())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def refresh(self) -> None:
        """Resolves once every target that may have come to mean something else."""
        before = self.addresses
        await asyncio.gather(*map(self._resolve, self._open_targets()))
        if self.addresses != before:
            self.changed.set()

    async def _keep_fresh(self) -> None:
        while self._open_targets():
            await asyncio.sleep(self._refresh_seconds)
            await self.refresh()

    def _open_targets(self) -> list[str]:
        """All but addresses in figures, which mean themselves once they have been read."""
        return [
            target
            for target, addresses in self._by_target.items()
            if not addresses or not _is_literal(_split(target)[0])
        ]

    async def _resolve(self, target: str) -> None:
        host, port = _split(target)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, family=socket.AF_UNSPEC
            )
        except OSError as error:
            if target not in self._unresolved:
                self._unresolved.add(target)
                logger.warning("cannot resolve %s yet: %s", target, error)
            return
        self._unresolved.discard(target)
        # A name with both families names each replica twice; one family names it once.
        families = {entry[0] for entry in found}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        self._by_target[target] = frozenset(
            _address(str(entry[4][0]), int(entry[4][1])) for entry in found if entry[0] == family
        )


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host.strip("[]"), int(port)


def _is_literal(host: str) -> bool:
    """Whether it is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
