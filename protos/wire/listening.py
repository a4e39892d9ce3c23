"""Says why a service cannot listen where it was told to: by its host, or by its port."""

import errno
import socket

from protos.wire.errors import StartupError


def check_listening(host: str, port: int) -> None:
    """Raises StartupError where `host` is none of this machine's, or `port` cannot be had there.

    Libraries that listen say either, if at all, in lines of their own.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise StartupError(f"--host: {host!r} is neither an address nor a known name") from error
    problem: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # Connections that ended a moment ago do not hold a port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return
        except OSError as error:
            # A name may stand for addresses of two kinds, of which the machine has one.
            if problem is None or error.errno in (errno.EADDRINUSE, errno.EACCES):
                problem = error
    if problem is not None and problem.errno in (errno.EADDRINUSE, errno.EACCES):
        raise StartupError(
            f"port {port} on {host} is taken or may not be used ({problem.strerror}); choose "
            "another with --port"
        ) from problem
    raise StartupError(f"--host: {host!r} is no address of this machine") from problem
