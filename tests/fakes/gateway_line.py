"""A gateway on a real socket, with scripted tokenizer, detokenizer and engine behind it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from gateway.server import serve_until
from gateway.settings import Settings
from protos.common.v1 import common_pb2
from tests.fakes.engine_script import Script
from tests.fakes.scripted_detok import DetokScript, ScriptedDetok, pieces
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.scripted_tokenizer import ScriptedTokenizer
from tests.fakes.waiting import DEADLINE_SECONDS, until

T = TypeVar("T")

MODEL = "tiny"
DEFAULT_SCRIPT = pieces("Hello", " there")
IDENTITY = common_pb2.ModelIdentity(name=MODEL, fingerprint="f" * 64)


def is_finished(record: dict[str, Any]) -> bool:
    return bool(record["state"] == "finished")


@dataclass
class GatewayLine:
    """The parts of a running line. `client` speaks to the gateway at `url`."""

    tokenizer: ScriptedTokenizer
    detok: ScriptedDetok
    engine: ScriptedEngine
    client: httpx2.AsyncClient
    settings: Settings
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """As it was when it began, for the next test; nothing may be live."""
        assert not self.detok.live
        self.tokenizer.error = None
        self.tokenizer.encoded.clear()
        self.detok.script = DEFAULT_SCRIPT
        self.detok.submitted.clear()
        self.detok.aborted.clear()
        self.client.headers.pop("x-request-id", None)

    async def chat(self, **fields: Any) -> httpx2.Response:
        """POST /v1/chat/completions with a short prompt unless `fields` says otherwise."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx2.Response:
        body = {"model": MODEL, "prompt": "hi", **fields}
        return await self.client.post("/v1/completions", json=body)

    async def send(self, endpoint: str, **fields: Any) -> httpx2.Response:
        """`endpoint` is "chat" or "complete"."""
        return await (self.chat(**fields) if endpoint == "chat" else self.complete(**fields))

    async def record(self, request_id: str) -> dict[str, Any]:
        response = await self.client.get(f"/v1/requests/{request_id}")
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def record_when(
        self, request_id: str, holds: Callable[[dict[str, Any]], bool] = is_finished
    ) -> dict[str, Any]:
        """The request's record once `holds` of it, by default once it is finished."""
        return await eventually(lambda: self.record(request_id), holds)


def events_of(response: httpx2.Response) -> list[Any]:
    """The events of a complete stream; its `[DONE]` is checked and left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event]
    data = [data_of(event) for event in events if not event.startswith(":")]
    assert data.count("[DONE]") == 1
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def data_of(event: str) -> str:
    """The data of one event, which may have an id."""
    (data,) = [line for line in event.split("\n") if line.startswith("data: ")]
    return data.removeprefix("data: ")


def chunks_of(response: httpx2.Response, index: int = 0) -> list[dict[str, Any]]:
    """The `choices` entries of one choice index, in order."""
    return [
        choice
        for event in events_of(response)
        for choice in event.get("choices", ())
        if choice["index"] == index
    ]


def streamed_text(response: httpx2.Response, index: int = 0) -> str:
    """The joined deltas of one choice, of either endpoint."""
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in chunks_of(response, index)
    )


def whole_text(response: httpx2.Response, index: int = 0) -> str:
    choice = response.json()["choices"][index]
    assert choice["index"] == index
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@asynccontextmanager
async def serving_gateway(settings: Settings) -> AsyncIterator[int]:
    """Runs a gateway in this process and yields its port; leaving the block drains it."""
    stop = asyncio.Event()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve_until(settings, stop, bound))
    try:
        await asyncio.wait((task, bound), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield await bound
    finally:
        stop.set()
        await task


async def eventually(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """Asks again and again until `holds` of the answer; AssertionError after DEADLINE_SECONDS."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds(answer := await ask()):
        assert time.monotonic() < deadline, f"it stayed at {answer}"
        await asyncio.sleep(0.01)
    return answer


async def until_ready(client: httpx2.AsyncClient) -> None:
    await eventually(lambda: client.get("/readyz"), lambda answer: answer.status_code == 200)


@asynccontextmanager
async def gateway_line(
    redis_url: str,
    script: DetokScript | None = None,
    *,
    max_model_len: int = 4096,
    max_num_seqs: int = 256,
    **settings_fields: Any,
) -> AsyncIterator[GatewayLine]:
    """A whole line, ready."""
    tokenizer = ScriptedTokenizer(IDENTITY)
    detok = ScriptedDetok(script or DEFAULT_SCRIPT, IDENTITY)
    engine = ScriptedEngine(
        Script(), model=IDENTITY, max_model_len=max_model_len, max_num_seqs=max_num_seqs
    )
    async with (
        tokenizer.serving() as tokenizer_address,
        detok.serving() as detok_address,
        engine.serving() as engine_address,
    ):
        settings = Settings(
            **{
                "tokenizer": (tokenizer_address,),
                "detok": (detok_address,),
                "engine": (engine_address,),
                "port": 0,
                "redis": redis_url,
                "drain_seconds": 0.0,
                **settings_fields,
            }
        )
        async with (
            serving_gateway(settings) as port,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client,
        ):
            await until_ready(client)
            yield GatewayLine(tokenizer, detok, engine, client, settings, port)
            await until(lambda: not detok.live, "the end of every sequence at the detokenizer")
