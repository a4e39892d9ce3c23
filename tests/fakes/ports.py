"""Ports for what a test starts itself."""

import random
import socket

# Below those that systems give to outgoing connections, one of which could take a port between its
# choice and its use, or while what listened on it is down.
_FIRST, _LAST = 15_000, 31_999
# Hypothesis seeds Python's own generator anew for each example.
_RANDOM = random.SystemRandom()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    while True:
        port = _RANDOM.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
