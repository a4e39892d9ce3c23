"""A chat whose text counts its tokens, streamed with ids, so that what is missing is seen."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from tests.fakes.gateway_line import MODEL, data_of
from tests.fakes.scripted_detok import DetokScript, output

NUM_TOKENS = 12
TEXT = "".join(f"{number} " for number in range(NUM_TOKENS))
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAMED = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
PATH = "/v1/chat/completions"


class Counting:
    """A script that counts, up to a gate."""

    def __init__(self, gate_at: int = NUM_TOKENS) -> None:
        self.gate = asyncio.Event()
        outputs = [output(f"{number} ", started=not number) for number in range(NUM_TOKENS)]
        for number, made in enumerate(outputs):
            made.token_ids[:] = [number]
        outputs[-1].finish.reason = common_pb2.FINISH_REASON_LENGTH
        self._script = DetokScript(outputs, gates={gate_at: self.gate})

    def __call__(self, submit: detok_pb2.Submit) -> DetokScript:
        return self._script


@asynccontextmanager
async def stream(
    client: httpx2.AsyncClient, method: str = "POST", path: str = PATH, **headers: str
) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The events of a stream, each with its id; [DONE] as the word."""
    body = None if method == "GET" else STREAMED
    async with client.stream(method, path, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield events_of(response)


async def events_of(response: httpx2.Response) -> AsyncIterator[tuple[str, Any]]:
    pending = ""
    async for piece in response.aiter_text():
        *events, pending = (pending + piece).split("\n\n")
        for event in events:
            if event.startswith(":"):
                continue
            event_id, _, _ = event.removeprefix("id: ").partition("\n")
            data = data_of(event)
            yield event_id, data if data == "[DONE]" else json.loads(data)


def text_of(events: Sequence[tuple[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for _, event in events
        if event != "[DONE]"
        for choice in event["choices"]
    )


async def read_until(events: AsyncIterator[tuple[str, Any]], last: int) -> list[tuple[str, Any]]:
    """The events up to the one that covers `last` tokens."""
    read = []
    async for event in events:
        read.append(event)
        if int(event[0]) >= last:
            break
    return read


def assert_whole(first: list[tuple[str, Any]], rest: list[tuple[str, Any]]) -> None:
    """`rest` is what followed `first` in an unbroken stream."""
    assert text_of(first + rest) == TEXT
    assert rest[-1][1] == "[DONE]"
    usage = rest[-2][1]["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (NUM_TOKENS, NUM_TOKENS + 2)
    ids = [int(event_id) for event_id, event in first + rest if event != "[DONE]"]
    assert ids[:-1] == sorted(set(ids[:-1])), "ids increase strictly up to the usage"
    assert "role" not in str(rest)
    assert [
        choice["finish_reason"]
        for _, event in rest
        if event != "[DONE]"
        for choice in event["choices"]
    ][-1] == "length"
