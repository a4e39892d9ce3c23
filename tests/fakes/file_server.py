"""An HTTP server on loopback that serves bytes by path: a stand-in for indexes and hubs."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class StoredFile:
    """What a GET or HEAD of one path answers."""

    content: bytes
    content_type: str = "application/octet-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200


class FileServer:
    """Serves `files` from `with` to its end; a path that is not in it is a 404.

    `num_gets` counts bodies sent by path. A body whose path is in `gates` waits for the event.
    """

    def __init__(self, files: Mapping[str, StoredFile]) -> None:
        self.files = dict(files)
        self.num_gets: Counter[str] = Counter()
        self.gates: dict[str, threading.Event] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler_class())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(send_body=False)

            def do_GET(self) -> None:
                self._answer(send_body=True)

            def _answer(self, send_body: bool) -> None:
                path = self.path.partition("?")[0]
                stored = server.files.get(path, StoredFile(b"not found", "text/plain", {}, 404))
                self.send_response(stored.status)
                self.send_header("content-type", stored.content_type)
                self.send_header("content-length", str(len(stored.content)))
                for name, value in stored.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if not send_body:
                    return
                server.num_gets[path] += 1
                if path in server.gates:
                    server.gates[path].wait(timeout=30)
                self.wfile.write(stored.content)

            def log_message(self, format: str, *arguments: object) -> None:
                """Tests read the counts instead."""

        return Handler
