"""A client that notes when each event came, what came twice, and how often it had to reconnect."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from tests.chaos.answer import Answer
from tests.chaos.workload import Request
from tests.fakes.raw_http import Broken, RawAnswer, exchange

DONE: Final = "[DONE]"
_NOT_NOW: Final = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 0.5
# Of a reader of streams; pings come far more often. A whole answer has none to show for itself.
_STREAM_SILENCE_SECONDS: Final = 2.0
_WHOLE_SILENCE_SECONDS: Final = 5.0


@dataclass
class Outcome:
    """What became of one request; `times` are those of its events, the first that of its start.

    `broken` says why it did not come to its end. `num_reconnects` counts connections after one
    that had begun to answer, `num_refusals` answers of "not now".
    """

    request: Request
    answer: Answer = field(default_factory=Answer)
    times: list[float] = field(default_factory=list)
    broken: str = ""
    num_duplicates: int = 0
    num_reconnects: int = 0
    num_refusals: int = 0
    faults: list[str] = field(default_factory=list)
    last_id: str = ""
    is_complete: bool = False

    @property
    def num_events(self) -> int:
        return max(0, len(self.times) - 1)

    @property
    def is_live(self) -> bool:
        return bool(self.times) and not self.is_complete and not self.broken

    def longest_pause(self, since: float = 0.0) -> float:
        """The longest time without an event, of the pauses that ended after `since`."""
        pauses = [after - before for before, after in pairwise(self.times) if after >= since]
        return max(pauses, default=0.0)


@dataclass(frozen=True)
class ClientOptions:
    """`key` is empty for a client that neither repeats nor resumes.

    silence_seconds: None for what suits the request. Without `request_id` the gateway makes one.
    """

    urls: Sequence[str]
    key: str = ""
    deadline_seconds: float = 60.0
    silence_seconds: float | None = None
    request_id: str = ""


class Client:
    """Sends one request until its answer is complete, to the next gateway after each failure."""

    def __init__(self, request: Request, options: ClientOptions) -> None:
        self.outcome = Outcome(request)
        self._options = options
        self._request = request
        self._silence = options.silence_seconds or (
            _STREAM_SILENCE_SECONDS if request.streams else _WHOLE_SILENCE_SECONDS
        )
        if not options.key:
            self._silence = options.deadline_seconds
        self._seen_at_last_id: set[str] = set()

    def resume(self, earlier: "Client") -> None:
        """Takes on what another client has received up to now; that one is left as it is."""
        self.outcome = copy.deepcopy(earlier.outcome)
        self.outcome.times.clear()
        self._seen_at_last_id = set(earlier._seen_at_last_id)

    async def run(self) -> Outcome:
        """Never raises but CancelledError: what goes wrong is in the outcome."""
        outcome = self.outcome
        outcome.times.append(time.monotonic())
        try:
            async with asyncio.timeout(self._options.deadline_seconds):
                await self._until_complete()
        except TimeoutError:
            outcome.broken = f"not complete after {self._options.deadline_seconds:g} s"
        except _Broken as error:
            outcome.broken = str(error)
        return outcome

    async def _until_complete(self) -> None:
        pause, urls = _FIRST_PAUSE_SECONDS, self._options.urls
        number = self._request.number
        while not self.outcome.is_complete:
            try:
                await self._attempt(urls[number % len(urls)])
            except (Broken, OSError) as error:
                self.outcome.faults.append(f"{type(error).__name__}: {error}")
                self._check_may_repeat()
                if isinstance(error, _NotNow):
                    self.outcome.num_refusals += 1
                    pause = max(pause, error.retry_after_seconds)
                elif self.outcome.num_events:
                    self.outcome.num_reconnects += 1
                number += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _check_may_repeat(self) -> None:
        outcome = self.outcome
        if not self._options.key:
            raise _Broken(outcome.faults[-1])
        if outcome.num_events and not outcome.last_id:
            raise _Broken(f"cannot resume, events have no ids; {outcome.faults[-1]}")

    async def _attempt(self, url: str) -> None:
        headers = {}
        if self._options.key:
            headers["idempotency-key"] = self._options.key
        if self._options.request_id:
            headers["x-request-id"] = self._options.request_id
        if self.outcome.last_id:
            headers["last-event-id"] = self.outcome.last_id
        async with exchange(
            url,
            "POST",
            self._request.path,
            headers,
            self._request.body,
            silence_seconds=self._silence,
        ) as response:
            if response.status in _NOT_NOW:
                body = (await response.body()).decode(errors="replace")
                raise _NotNow(response.status, body, response.headers)
            if response.status != 200:
                body = (await response.body()).decode(errors="replace")
                raise _Broken(f"HTTP {response.status}: {body[:300]}")
            if self._request.streams:
                await self._read(response)
                return
            self.outcome.answer.add(json.loads(await response.body()))
            self.outcome.times.append(time.monotonic())
            self.outcome.is_complete = True

    async def _read(self, response: RawAnswer) -> None:
        """Adds the events of one connection; Broken when it ends before [DONE]."""
        named = self.outcome.last_id
        before = self._seen_at_last_id if named else set()
        async for event_id, data in sse_events(response):
            self.outcome.times.append(time.monotonic())
            if is_behind(event_id, self.outcome.last_id):
                self.outcome.num_duplicates += 1
                continue
            if data == DONE:
                self.outcome.is_complete = True
                return
            body = json.loads(data)
            if "error" in body:
                raise _Broken(f"error event: {data[:300]}")
            # What has no token of its own (the end, the usage) has the id of the last token, and
            # comes again to who names that id.
            content = json.dumps([body["choices"], body.get("usage")])
            is_again = event_id and event_id == named and content in before
            if event_id != self.outcome.last_id:
                self._seen_at_last_id = set()
            self._seen_at_last_id.add(content)
            if event_id:
                self.outcome.last_id = event_id
            if not is_again:
                self.outcome.answer.add(body)
            elif not _is_end(body):
                self.outcome.num_duplicates += 1
        raise Broken("the stream ended without [DONE]")


class _Broken(Exception):
    """What no repetition would mend."""


class _NotNow(Broken):
    def __init__(self, status: int, body: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.retry_after_seconds = float(headers.get("retry-after", 0))


def _is_end(body: Mapping[str, Any]) -> bool:
    return all(choice.get("finish_reason") for choice in body["choices"])


def is_behind(event_id: str, last_id: str) -> bool:
    """Whether an event covers less of any choice than `last_id`, or no more of all of them."""
    if not event_id or not last_id:
        return False
    covered = [int(part) for part in event_id.split(".")]
    before = [int(part) for part in last_id.split(".")]
    return any(now < then for now, then in zip(covered, before, strict=True))


async def sse_events(response: RawAnswer) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of each event that came whole; comments are none."""
    pending = b""
    event_id, data = "", []
    async for piece in response.pieces():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if not line:
                if data:
                    yield event_id, "\n".join(data)
                event_id, data = "", []
                continue
            name, _, text = line.decode().partition(":")
            if name == "id":
                event_id = text.removeprefix(" ")
            elif name == "data":
                data.append(text.removeprefix(" "))
