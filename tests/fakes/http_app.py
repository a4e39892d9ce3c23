"""Serves an ASGI application over a real socket on loopback, from a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serve_app(app: Any) -> Iterator[str]:
    """Yields the URL at which `app` answers."""
    # No log_level and no log_config: they would change the loggers of the whole process, and with
    # them what later tests see.
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        # Connections made from here on wait in the socket's queue until the server takes them.
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        socket.close()
