"""What a client may cost while it is slow, silent or one of many: times, and open connections."""

import enum
import logging
import resource
import socket
from dataclasses import dataclass
from typing import Final, Protocol

from protos.wire.errors import StartupError

logger = logging.getLogger(__name__)

_DEFAULT_MAX_CONNECTIONS: Final = 4096
# Connections over the limit that are told so; what comes beyond them is closed without a word.
_MAX_REFUSALS: Final = 64
# Connections that wait to be accepted: so many may come in one go, before any is closed for them.
BACKLOG: Final = 2048
# File descriptors for all else: Redis, channels, files.
_OTHER_DESCRIPTORS: Final = 256

# A peer that vanished without a word is noticed after 30 + 3 · 10 s.
_TCP_OPTIONS: Final = (
    ("TCP_KEEPIDLE", 30),
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 3),
    # Unsent bytes that the kernel takes for a connection. Without it a reader that does not read
    # costs up to 4 MiB (tcp_wmem) of kernel memory before the gateway notices.
    ("TCP_NOTSENT_LOWAT", 32 << 10),
)


@dataclass(frozen=True)
class ConnectionLimits:
    """Times are in seconds.

    head_seconds: from a request's first byte to the end of its headers.
    body_silence_seconds: without a byte of a body that is due.
    body_seconds, body_bytes_per_second: a body of N bytes may take body_seconds + N / this.
    idle_seconds: a connection without a request.
    send_timeout_seconds: a client may take nothing of what is there for it.
    """

    max_connections: int = _DEFAULT_MAX_CONNECTIONS
    max_refusals: int = _MAX_REFUSALS
    head_seconds: float = 10.0
    body_silence_seconds: float = 10.0
    body_seconds: float = 20.0
    body_bytes_per_second: int = 4096
    idle_seconds: int = 75
    send_timeout_seconds: float = 60.0


class Connection(Protocol):
    """What Connections knows of one."""

    def give_way(self) -> None:
        """Closes it, as no request would be lost."""


class Admittance(enum.Enum):
    TAKEN = enum.auto()
    # Is told that there are too many.
    REFUSED = enum.auto()
    # Is closed without a word.
    DROPPED = enum.auto()


class Connections:
    """Decides who gives way when there are too many.

    At the limit the connection that has waited longest for a request is closed for a new one, so
    that those who only hold connections keep nobody out; where each has a request, the new one is
    refused.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._taken: set[Connection] = set()
        self._refused: set[Connection] = set()
        # In the order in which they began to wait; a dict, since a set has none.
        self._waiting: dict[Connection, None] = {}
        self._is_full = False

    def add(self, connection: Connection) -> Admittance:
        """Whether a new connection, which has no request yet, can be taken."""
        limits = self.limits
        if len(self._taken) < limits.max_connections:
            self._is_full = self._is_full and len(self._taken) > limits.max_connections * 0.9
        else:
            if not self._is_full:
                self._is_full = True
                logger.warning("%d connections are open, the limit", limits.max_connections)
            if not self._waiting:
                if len(self._refused) >= limits.max_refusals:
                    return Admittance.DROPPED
                self._refused.add(connection)
                return Admittance.REFUSED
            next(iter(self._waiting)).give_way()
        self._taken.add(connection)
        self._waiting[connection] = None
        return Admittance.TAKEN

    def begin_waiting(self, connection: Connection) -> None:
        self._waiting[connection] = None

    def end_waiting(self, connection: Connection) -> None:
        """Also where it does not wait."""
        self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """A connection that is closed."""
        self._waiting.pop(connection, None)
        self._taken.discard(connection)
        self._refused.discard(connection)


def connection_capacity(wanted: int | None) -> int:
    """How many connections the process can hold: `wanted`, by default 4096 or what is possible.

    Raises the process's limit of open files where that is needed; StartupError where `wanted`
    is over what it may be raised to.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = _MAX_REFUSALS + BACKLOG + _OTHER_DESCRIPTORS
    needed = (_DEFAULT_MAX_CONNECTIONS if wanted is None else wanted) + others
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = needed if soft == resource.RLIM_INFINITY else soft
    if possible < needed and (wanted is not None or possible <= others):
        raise StartupError(
            f"{needed - others} connections need {needed} open files, and this process may have "
            f"{possible}; raise that limit (ulimit -n), or lower --max-connections"
        )
    return min(needed, possible) - others


def watch_peers(listener: socket.socket, send_timeout_seconds: float) -> None:
    """Has the kernel end connections whose peer is gone, or takes nothing; accepted ones inherit.

    TCP_USER_TIMEOUT also ends those whose peer answers, but keeps its window shut (tcp(7)). Options
    that a system lacks are left out: they only make it notice earlier.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    milliseconds = max(1, round(send_timeout_seconds * 1000))
    for name, value in (*_TCP_OPTIONS, ("TCP_USER_TIMEOUT", milliseconds)):
        if (option := getattr(socket, name, None)) is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
