"""Loopback ports for the services, and a clear word when a port is taken."""

import errno
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from compose.errors import CommandError

_LOWEST: Final = 20_000
_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL_START: Final = 32_768
_ENOUGH: Final = 1_000
_HIGHEST: Final = 60_000


def free_ports(count: int, excluding: Sequence[int] = ()) -> list[int]:
    """`count` different loopback ports that nothing listens on, none of them in `excluding`.

    They lie below the range that the kernel gives to outgoing connections, where it leaves room, so
    that a service which is restarted later still finds its port free. Raises CommandError when
    there are too few.
    """
    candidates = [port for port in range(_LOWEST, _end_of_search()) if port not in excluding]
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        if _can_bind("127.0.0.1", port):
            found.append(port)
    if len(found) < count:
        raise CommandError(f"too few free loopback ports above {_LOWEST}")
    return found


def require_free(host: str, port: int) -> None:
    """Raises CommandError, naming the holder where it can be seen, when `host`:`port` is taken."""
    if _can_bind(host, port):
        return
    raise CommandError(
        f"port {port} is taken{_holder(port)}: stop what holds it, or choose another with --port"
    )


def _can_bind(host: str, port: int) -> bool:
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            # As servers do: connections that linger from an earlier server do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
    except socket.gaierror as error:
        raise CommandError(f"cannot listen on {host}: {error.strerror}") from error
    except PermissionError as error:
        raise CommandError(f"port {port} needs privileges: choose one above 1023") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            cause = f"{error.strerror}"
            if error.errno == errno.EADDRNOTAVAIL:
                cause = "it is no address of this machine; 0.0.0.0 is all that it has"
            raise CommandError(f"cannot listen on {host}: {cause}") from error
        return False
    return True


def _holder(port: int) -> str:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.pid is None:
            continue
        if connection.laddr and connection.laddr.port == port:
            try:
                name = psutil.Process(connection.pid).name()
            except psutil.Error:
                return f" by process {connection.pid}"
            return f" by {name} (process {connection.pid})"
    return ""


def _end_of_search() -> int:
    """Where the range for outgoing connections starts, unless it leaves no room below itself."""
    try:
        start = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:
        start = _USUAL_EPHEMERAL_START
    return start if start >= _LOWEST + _ENOUGH else _HIGHEST
