"""The part of a gateway's HTTP API that the commands use, with answers that a test sets."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class StandInGateway:
    """`events` are sent for every chat, each as one `data:` line; `bodies` is what was asked."""

    def __init__(self, events: Sequence[Mapping[str, Any] | str] = ()) -> None:
        self.events = list(events)
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.refusal: tuple[int, bytes] | None = None
        self.missing: list[str] = []
        self.ready_engines = [True]
        self.redis = "connected"
        self.max_model_len = 4096
        # Asked for where it is not empty.
        self.api_key = ""
        self.app = Starlette(
            routes=[
                Route("/readyz", self._readyz),
                Route("/v1/models", self._models),
                Route("/v1/requests", self._requests),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _readyz(self, request: Request) -> Response:
        body = {
            "missing": self.missing,
            "model": None if self.missing else "stand-in",
            "engines": [{"ready": ready} for ready in self.ready_engines],
            "redis": self.redis,
        }
        return JSONResponse(body, 503 if self.missing else 200)

    def _refused(self, request: Request) -> Response | None:
        if not self.api_key or request.headers.get("authorization") == f"Bearer {self.api_key}":
            return None
        return JSONResponse({"error": {"message": "No key."}}, 401)

    async def _models(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        model = {"id": "stand-in", "object": "model", "max_model_len": self.max_model_len}
        return JSONResponse({"object": "list", "data": [] if self.missing else [model]})

    async def _requests(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        return JSONResponse({"object": "list", "data": self.requests})

    async def _chat(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        self.bodies.append(await request.json())
        if self.refusal is not None:
            status, body = self.refusal
            return Response(body, status)
        lines = [
            f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
            for event in self.events
        ]
        return StreamingResponse(iter(lines), media_type="text/event-stream")


def chunk(text: str | None = None, finish_reason: str | None = None) -> dict[str, Any]:
    """One event of a streamed chat completion."""
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage(completion_tokens: int) -> dict[str, Any]:
    """The event that carries the counts, last before [DONE]."""
    return {"choices": [], "usage": {"completion_tokens": completion_tokens}}
