"""A client that gets a whole answer out of several gateways, whichever of them die meanwhile."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.raw_http import Broken, RawAnswer, exchange

DONE = "[DONE]"
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_NOT_NOW = frozenset({408, 429, 502, 503, 504})


class Refused(Exception):
    """An answer that trying again would not change, or no answer before the deadline."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:500]}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Event:
    """`id` as it stood in the stream ("" where there was none), `data` undecoded."""

    id: str
    data: str

    @property
    def covered(self) -> tuple[int, ...]:
        """Tokens per choice."""
        return tuple(int(part) for part in self.id.split(".")) if self.id else ()

    @property
    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.data))


@dataclass
class StreamedAnswer:
    """The events of one request, over all connections that it took.

    repeated: what came again, to the letter, with the id that the client had named: an end whose
    id is that of the last token. duplicates: events that cover tokens which the client had.
    longest_pause_seconds: the longest time between two events, or before the first, over all
    connections.
    """

    key: str
    events: list[Event] = field(default_factory=list)
    repeated: list[Event] = field(default_factory=list)
    duplicates: list[Event] = field(default_factory=list)
    num_connections: int = 0
    faults: list[str] = field(default_factory=list)
    longest_pause_seconds: float = 0.0
    last_event_at: float = field(default_factory=time.monotonic)
    is_complete: bool = False

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The events' bodies, without [DONE]."""
        return [event.body for event in self.events if event.data != DONE]

    @property
    def last_id(self) -> str:
        return next((event.id for event in reversed(self.events) if event.id), "")


@dataclass
class ReconnectingClient:
    """Goes to the next of `urls` whenever a connection ends, is silent or answers "not now".

    The gateways' `--ping-seconds` should be well below `silence_seconds`, or waiting requests are
    attached to again and again (which works too).
    """

    urls: Sequence[str]
    silence_seconds: float = 2.0
    deadline_seconds: float = 120.0
    headers: Mapping[str, str] = field(default_factory=dict)

    async def stream(
        self, body: Mapping[str, Any], key: str, path: str = "/v1/chat/completions", first: int = 0
    ) -> StreamedAnswer:
        """The streamed answer to `body`, to its [DONE]; `first`: the number of the first URL.

        Refused where the answer is an error, or is not complete by the deadline.
        """
        answer = StreamedAnswer(key)
        await self._until_complete(answer, {**body, "stream": True}, path, first)
        return answer

    async def whole(
        self, body: Mapping[str, Any], key: str, path: str = "/v1/chat/completions", first: int = 0
    ) -> dict[str, Any]:
        """The answer that is not streamed."""
        answer = StreamedAnswer(key)
        return json.loads(await self._until_complete(answer, dict(body), path, first))

    async def _until_complete(
        self, answer: StreamedAnswer, body: dict[str, Any], path: str, first: int
    ) -> bytes:
        pause = _FIRST_PAUSE_SECONDS
        deadline = time.monotonic() + self.deadline_seconds
        while True:
            url = self.urls[(first + answer.num_connections) % len(self.urls)]
            answer.num_connections += 1
            had = len(answer.events)
            try:
                return await self._attempt(answer, url, path, body)
            except _NotNow as error:
                answer.faults.append(str(error))
                pause = max(pause, error.retry_after_seconds)
            except (Broken, OSError) as error:
                answer.faults.append(f"{url}: {error}")
                if len(answer.events) > had:
                    pause = _FIRST_PAUSE_SECONDS
            if time.monotonic() + pause > deadline:
                raise Refused(0, f"not complete by the deadline; {answer.faults[-5:]}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _attempt(
        self, answer: StreamedAnswer, url: str, path: str, body: dict[str, Any]
    ) -> bytes:
        headers = {**self.headers, "idempotency-key": answer.key}
        if answer.last_id:
            headers["last-event-id"] = answer.last_id
        async with exchange(
            url, "POST", path, headers, body, silence_seconds=self.silence_seconds
        ) as response:
            if response.status in _NOT_NOW:
                raise _NotNow(response.status, await response.body(), response.headers)
            if response.status != 200:
                raise Refused(response.status, (await response.body()).decode())
            if not body.get("stream"):
                return await response.body()
            await _read_events(response, answer)
            return b""


class _NotNow(Exception):
    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status}: {body[:200]!r}")
        self.retry_after_seconds = float(headers.get("retry-after", 0))


async def _read_events(response: RawAnswer, answer: StreamedAnswer) -> None:
    """Adds the events of one connection; Broken when it ends before [DONE]."""
    named = answer.last_id
    had = {event.data for event in answer.events if event.id == named} if named else set()
    async for event in _events(response):
        now = time.monotonic()
        pause, answer.last_event_at = now - answer.last_event_at, now
        answer.longest_pause_seconds = max(answer.longest_pause_seconds, pause)
        if event.id == named and event.data in had:
            answer.repeated.append(event)
        elif event.covered and _is_behind(event.covered, answer.last_id):
            answer.duplicates.append(event)
        else:
            answer.events.append(event)
        if event.data == DONE:
            answer.is_complete = True
            return
    raise Broken("the stream ended without [DONE]")


def _is_behind(covered: tuple[int, ...], last_id: str) -> bool:
    """Whether an event covers less of any choice than the last one did."""
    last = Event(last_id, "").covered
    return any(number < before for number, before in zip(covered, last, strict=False))


async def _events(response: RawAnswer) -> AsyncIterator[Event]:
    """Whole events only: what a cut leaves unfinished is none."""
    pending = b""
    event_id, data = "", []
    async for piece in response.pieces():
        *lines, pending = (pending + piece).split(b"\n")
        for line in (raw.decode() for raw in lines):
            if not line:
                if data:
                    yield Event(event_id, "\n".join(data))
                event_id, data = "", []
                continue
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "id":
                event_id = value
            elif name == "data":
                data.append(value)
