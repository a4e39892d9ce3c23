"""Must-show 3: two gateways that both believe they own a request; log and clients stay right."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import redis.asyncio

from tests.chaos.answer import differences
from tests.chaos.client import Client, ClientOptions, Outcome
from tests.chaos.faults import serves
from tests.chaos.line import ChaosLine
from tests.chaos.report import Table
from tests.chaos.workload import KINDS, Request, make_workload

# Long enough that both gateways write for a while, once the first one wakes up.
_MAX_TOKENS: Final = 500
_PATIENCE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.01
_NUM_EVENTS_BEFORE: Final = 20
_NUM_EVENTS_AFTER: Final = 20
_SKIPPED: Final = frozenset({"json schema", "tool call"})


@dataclass
class Tally:
    """What clients in one role got."""

    role: str
    num_streams: int = 0
    num_bad: int = 0
    num_reconnects: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, outcome: Outcome, reference: Outcome) -> None:
        self.num_streams += 1
        self.num_reconnects += outcome.num_reconnects
        phrases = [outcome.broken] if outcome.broken else []
        phrases = phrases or differences(reference.answer, outcome.answer)
        if outcome.num_duplicates:
            phrases.append(f"{outcome.num_duplicates} duplicates")
        if phrases:
            self.num_bad += 1
            self.examples.append(
                f"{outcome.request.name}: {'; '.join(phrases)}; saw {outcome.faults[-3:]}"
            )


class Fencing:
    """Rounds on one line. Gateway 1 owns the requests and is stopped; gateway 2 takes them."""

    def __init__(self, line: ChaosLine, model: str, seed: int) -> None:
        self._line = line
        self._requests = [
            _lengthened(request)
            for request in make_workload(model, len(KINDS), seed)
            if request.streams and request.kind not in _SKIPPED
        ]
        self._reference: dict[int, Outcome] = {}
        self._tallies = {
            role: Tally(role) for role in ("first", "reconnected", "attached", "afterwards")
        }
        self._num_bad_records = 0
        self._notes: list[str] = []

    async def run(self, num_rounds: int, say: Callable[[str], None]) -> Table:
        outcomes = await asyncio.gather(
            *(Client(request, ClientOptions(self._line.urls)).run() for request in self._requests)
        )
        self._reference = {outcome.request.number: outcome for outcome in outcomes}
        for number in range(num_rounds):
            try:
                await self._round(number)
            except TimeoutError as error:
                self._num_bad_records += 1
                self._notes.append(f"round {number}: {str(error)[:1000]}")
        return self._table(num_rounds, say)

    async def _round(self, number: int) -> None:
        """In even rounds the first gateway wakes up in mid-stream, in odd ones after the end."""
        await self._line.wait_whole()
        first_url, second_url = self._line.urls
        sleeper = self._line.replicas("gateway")[0].process
        keys = {request.number: f"fence-{number}-{request.number}" for request in self._requests}
        firsts = [self._client(request, first_url, keys) for request in self._requests]
        tasks = [asyncio.create_task(client.run()) for client in firsts]
        others: list[Client] = []
        try:
            await _until_events(firsts, _NUM_EVENTS_BEFORE)
            sleeper.send(signal.SIGSTOP)
            reconnected = [
                self._client(client.outcome.request, second_url, keys, client) for client in firsts
            ]
            attached = [self._client(request, second_url, keys) for request in self._requests]
            others = [*reconnected, *attached]
            tasks += [asyncio.create_task(client.run()) for client in others]
            await _until_events(others, _NUM_EVENTS_AFTER if number % 2 == 0 else None)
            sleeper.send(signal.SIGCONT)
            await asyncio.gather(*tasks)
        finally:
            sleeper.send(signal.SIGCONT)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._note("first", firsts)
        self._note("reconnected", reconnected)
        self._note("attached", attached)
        await self._check_records(list(keys.values()))
        await self._replay(number, keys)

    def _client(
        self,
        request: Request,
        url: str,
        keys: dict[int, str],
        earlier: Client | None = None,
    ) -> Client:
        """`earlier`: what the client had before it came to this gateway."""
        options = ClientOptions(
            [url],
            keys[request.number],
            _PATIENCE_SECONDS,
            # The connection to a stopped gateway stays open; who waits for it is patient.
            silence_seconds=_PATIENCE_SECONDS,
            request_id=keys[request.number],
        )
        client = Client(request, options)
        if earlier is not None:
            client.resume(earlier)
        return client

    def _note(self, role: str, clients: Sequence[Client]) -> None:
        for client in clients:
            reference = self._reference[client.outcome.request.number]
            self._tallies[role].note(client.outcome, reference)

    async def _check_records(self, request_ids: Sequence[str]) -> None:
        """Each record says that another gateway has it, that it ended, and will go by itself."""
        client: Any = redis.asyncio.from_url(self._line.redis_url, decode_responses=True)
        try:
            for request_id in request_ids:
                key = f"tokenline:request:{request_id}"
                record, life = await client.hgetall(key), await client.ttl(key)
                bad = [
                    phrase
                    for phrase, is_bad in (
                        (f"epoch {record.get('epoch')}", int(record.get("epoch", 0)) < 2),
                        (f"state {record.get('state')}", record.get("state") != "finished"),
                        (f"TTL {life}", life <= 0),
                    )
                    if is_bad
                ]
                if bad:
                    self._num_bad_records += 1
                    self._notes.append(f"record of {request_id}: {', '.join(bad)}")
        finally:
            await client.aclose()

    async def _replay(self, number: int, keys: dict[int, str]) -> None:
        """What Redis has of the requests is all that gateways without a memory can answer from."""
        gateways = self._line.replicas("gateway")
        starts = [gateway.process.num_starts for gateway in gateways]
        for gateway in gateways:
            gateway.process.send(signal.SIGKILL)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for gateway, before in zip(gateways, starts, strict=True):
            while gateway.process.num_starts == before or not await serves(gateway):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{gateway.name} did not come back")
                await asyncio.sleep(_POLL_SECONDS)
        await self._line.wait_whole()
        url = self._line.urls[number % 2]
        clients = [self._client(request, url, keys) for request in self._requests]
        await asyncio.gather(*(client.run() for client in clients))
        self._note("afterwards", clients)

    def _table(self, num_rounds: int, say: Callable[[str], None]) -> Table:
        table = Table(
            "client rounds streams bad reconnects",
            "first: stays connected to the gateway that is stopped; reconnected: names its last "
            "event at the other; attached: reads all from the other; afterwards: reads all from a "
            "gateway that knows it from Redis alone",
        )
        for tally in self._tallies.values():
            table.add(
                tally.role,
                num_rounds,
                tally.num_streams,
                tally.num_bad,
                tally.num_reconnects,
                is_good=bool(tally.num_streams) and not tally.num_bad,
            )
            for example in tally.examples[:3]:
                say(f"  {tally.role}: {example}")
        for note in self._notes[:5]:
            say(f"  {note}")
        bad = self._num_bad_records
        table.add("records", num_rounds, num_rounds * len(self._requests), bad, "", is_good=not bad)
        return table


def _lengthened(request: Request) -> Request:
    return replace(
        request,
        body={**request.body, "max_tokens": _MAX_TOKENS},
        start_seconds=0.0,
    )


async def _until_events(clients: Sequence[Client], num_events: int | None) -> None:
    """Waits until each client has so many events, or its end; None: until all have their end."""
    deadline = time.monotonic() + _PATIENCE_SECONDS

    def is_there(client: Client) -> bool:
        outcome = client.outcome
        has_enough = num_events is not None and outcome.num_events >= num_events
        return has_enough or outcome.is_complete or bool(outcome.broken)

    while not all(map(is_there, clients)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"clients did not get {num_events or 'all'} events")
        await asyncio.sleep(_POLL_SECONDS)
