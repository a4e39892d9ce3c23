"""A client that reads a streamed chat event by event over a real socket."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx


@asynccontextmanager
async def open_stream(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    request_id: str,
    path: str = "/v1/chat/completions",
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Yields the events of the answer, without [DONE]; leaving the block closes the connection."""
    headers = {"x-request-id": request_id, "connection": "close"}
    request = {"stream": True, **body}
    async with client.stream("POST", url + path, json=request, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def text_of(events: list[dict[str, Any]]) -> str:
    """The joined text of a chat with one choice."""
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )


def finish_reason_of(events: list[dict[str, Any]]) -> str | None:
    """The reason in the last event that has a choice."""
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    return reasons[-1] if reasons else None
