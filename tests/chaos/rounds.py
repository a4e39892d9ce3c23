"""Must-show 1: rounds of mixed streams, a fault in the midst of each, compared with no fault."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import grpc

from protos.common.v1 import common_pb2
from tests.chaos.answer import differences
from tests.chaos.client import Client, ClientOptions, Outcome
from tests.chaos.faults import FAULTS, RANK_FAULTS, nothing, restart_all
from tests.chaos.line import ChaosLine
from tests.chaos.report import Table
from tests.chaos.workload import Request, with_own_stop

# Every process is restarted in turn, while waves of streams go on.
ROLLING: Final = "rolling"
LIMIT_BEYOND_RESTART_SECONDS: Final = 2.0
_IDLE_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.01
_MAX_EXAMPLES: Final = 3


@dataclass
class Reference:
    """The unbroken answers, and their pace."""

    outcomes: Mapping[int, Outcome]

    @property
    def num_events(self) -> int:
        return sum(len(outcome.times) for outcome in self.outcomes.values())


@dataclass
class Tally:
    """What the rounds of one service and fault came to."""

    service: str
    fault: str
    num_rounds: int = 0
    num_streams: int = 0
    num_live: list[int] = field(default_factory=list)
    num_wrong: int = 0
    num_lost: int = 0
    num_duplicated: int = 0
    num_broken: int = 0
    num_reconnects: int = 0
    gaps: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    judges_time: bool = True

    @property
    def is_good(self) -> bool:
        is_late = max(self.beyond, default=0.0) > LIMIT_BEYOND_RESTART_SECONDS
        return not (
            self.num_wrong
            or self.num_lost
            or self.num_duplicated
            or self.num_broken
            or (self.judges_time and is_late)
        )

    def note(self, outcome: Outcome, phrases: Sequence[str]) -> None:
        """Counts one stream under the worst that happened to it."""
        self.num_streams += 1
        self.num_reconnects += outcome.num_reconnects
        kinds = {phrase.partition(":")[0] for phrase in phrases}
        self.num_broken += bool(outcome.broken)
        self.num_duplicated += bool(outcome.num_duplicates) or "duplicated" in kinds
        self.num_lost += "lost" in kinds
        self.num_wrong += "wrong" in kinds
        if phrases or outcome.broken or outcome.num_duplicates:
            words = [outcome.broken, *phrases, f"{outcome.num_duplicates} duplicates"]
            faults = f"; client saw {outcome.faults[-3:]}" if outcome.faults else ""
            self.examples.append(f"{outcome.request.name}: {'; '.join(words)}{faults}")


class Rounds:
    """Runs rounds on one line. judges_time: whether a stream that takes too long is a failure."""

    def __init__(
        self, line: ChaosLine, workload: Sequence[Request], seed: int, *, judges_time: bool
    ) -> None:
        self._line = line
        self._workload = list(workload)
        self._seed = seed
        self._judges_time = judges_time
        self._reference = Reference({})
        self._num_rounds = 0

    async def prepare(self) -> None:
        """Finds the stop strings, then the reference. Raises RuntimeError when it is not whole."""
        probes = [request for request in self._workload if request.stops_at_own_text]
        found = await self._complete([replace(request, start_seconds=0) for request in probes])
        for outcome in found.values():
            text = max((choice.text for choice in outcome.answer.choices.values()), key=len)
            number = outcome.request.number
            self._workload[number] = with_own_stop(self._workload[number], text)
        self._reference = Reference(await self._complete(self._workload))

    async def _complete(self, requests: Sequence[Request]) -> dict[int, Outcome]:
        outcomes = await asyncio.gather(*(_at_its_time(client) for client in self._plain(requests)))
        for outcome in outcomes:
            if outcome.broken:
                raise RuntimeError(
                    f"without any fault, {outcome.request.name} broke: {outcome.broken}"
                )
        return {outcome.request.number: outcome for outcome in outcomes}

    def _plain(self, requests: Sequence[Request]) -> list[Client]:
        return [Client(request, ClientOptions(self._line.urls)) for request in requests]

    async def run(self, service: str, fault: str, num_rounds: int) -> Tally:
        """Rounds with one fault each; `fault` "none" for none."""
        tally = Tally(service, fault, judges_time=self._judges_time)
        for number in range(num_rounds):
            source = random.Random(f"{self._seed} {service} {fault} {number}")
            try:
                await (
                    self._rolling_round(tally) if fault == ROLLING else self._round(tally, source)
                )
                await self._line.wait_whole()
                await wait_idle(self._line, _IDLE_SECONDS)
            except TimeoutError as error:
                tally.num_broken += 1
                tally.examples.append(f"round {number}: {str(error)[:3000]}")
            tally.num_rounds += 1
        return tally

    async def _rolling_round(self, tally: Tally) -> None:
        """Waves of streams, one after another, until every process was restarted."""
        rolling = asyncio.create_task(restart_all(self._line))
        started = time.monotonic()
        try:
            while not rolling.done():
                self._num_rounds += 1
                hit_at = time.monotonic()
                clients = [self._client(request, tally) for request in self._workload]
                for outcome in await asyncio.gather(*map(_at_its_time, clients)):
                    # Several replicas in turn: none is a stream's excuse for long. But with one of
                    # two engines, and its start beside it, the line is half as fast or less.
                    self._judge(tally, outcome, hit_at, 0.0, slowness=3.0)
            await rolling
        finally:
            rolling.cancel()
        tally.num_live.append(len(self._workload))
        tally.restarts.append(time.monotonic() - started)

    async def _round(self, tally: Tally, source: random.Random) -> None:
        self._num_rounds += 1
        target = source.choice(self._line.replicas(tally.service))
        clients = [self._client(request, tally) for request in self._workload]
        tasks = [asyncio.create_task(_at_its_time(client)) for client in clients]
        try:
            await _until_progress(clients, source.uniform(0.02, 0.7) * self._reference.num_events)
            tally.num_live.append(sum(client.outcome.is_live for client in clients))
            hit_at = time.monotonic()
            fault = (FAULTS | RANK_FAULTS).get(tally.fault, nothing)
            away = await fault(self._line, target)
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        tally.restarts.append(away)
        for outcome in outcomes:
            self._judge(tally, outcome, hit_at, away)

    def _client(self, request: Request, tally: Tally) -> Client:
        # Only gateways, which clients are connected to, may make a client reconnect. So elsewhere
        # every other client is one that cannot.
        has_key = (
            tally.service in ("gateway", "every") or not request.streams or request.number % 4 < 2
        )
        key = f"chaos-{self._num_rounds}-{request.number}" if has_key else ""
        return Client(request, ClientOptions(self._line.urls, key))

    def _judge(
        self, tally: Tally, outcome: Outcome, hit_at: float, away: float, *, slowness: float = 1.0
    ) -> None:
        reference = self._reference.outcomes[outcome.request.number]
        complete = not outcome.broken
        tally.note(outcome, differences(reference.answer, outcome.answer) if complete else [])
        if complete and outcome.request.streams and outcome.times[-1] > hit_at:
            gap = outcome.longest_pause(hit_at) - slowness * reference.longest_pause()
            tally.gaps.append(max(0.0, gap))
            tally.beyond.append(max(0.0, gap - away))
            if gap - away > LIMIT_BEYOND_RESTART_SECONDS:
                tally.examples.append(
                    f"{outcome.request.name}: paused for {gap:.2f} s beyond its pace; client "
                    f"saw {outcome.faults[-2:]}"
                )


async def wait_idle(line: ChaosLine, timeout_seconds: float) -> None:
    """Waits until no engine has anything to do; TimeoutError says what it still has."""
    deadline = time.monotonic() + timeout_seconds
    state = ""
    while time.monotonic() < deadline:
        try:
            loads = await line.engine_loads()
        except grpc.aio.AioRpcError as error:
            state = f"an engine does not answer: {error.code().name}"
        else:
            if all(map(_is_idle, loads)):
                return
            state = f"engines are not idle: {loads}"
        await asyncio.sleep(_POLL_SECONDS)
    raise TimeoutError(state)


def _is_idle(load: common_pb2.EngineLoad) -> bool:
    has_work = load.num_running or load.num_waiting
    return not has_work and load.num_free_blocks == load.num_blocks


async def _at_its_time(client: Client) -> Outcome:
    # An arrival is an event of the workload, not a wait for something else.
    await asyncio.sleep(client.outcome.request.start_seconds)
    return await client.run()


async def _until_progress(clients: Sequence[Client], num_events: float) -> None:
    """Waits until so many events have come in all, or all has ended."""
    while sum(len(client.outcome.times) for client in clients) < num_events and not all(
        client.outcome.broken or client.outcome.is_complete for client in clients
    ):
        await asyncio.sleep(_POLL_SECONDS)


def fault_table(tallies: Sequence[Tally]) -> Table:
    table = Table(
        "service fault rounds streams live wrong lost dup. broken reconn. gap beyond restart",
        (
            "live: requests in progress when the fault came (median); gap: longest pause of a "
            "stream after it beyond its ordinary one, s, median / worst; beyond: worst gap less "
            f"the time that the replica was away, at most {LIMIT_BEYOND_RESTART_SECONDS:g}; "
            "restart: seconds it was away, median"
        ),
    )
    for tally in tallies:
        table.add(
            *(tally.service, tally.fault, tally.num_rounds, tally.num_streams),
            f"{_median(tally.num_live):.0f}",
            *(tally.num_wrong, tally.num_lost, tally.num_duplicated, tally.num_broken),
            tally.num_reconnects,
            f"{_median(tally.gaps):.2f} / {max(tally.gaps, default=0):.2f}",
            f"{max(tally.beyond, default=0):.2f}",
            f"{_median(tally.restarts):.1f}",
            is_good=tally.is_good,
        )
    return table


def _median(numbers: Sequence[float]) -> float:
    return statistics.median(numbers) if numbers else 0.0


async def run_faults(
    rounds: Rounds,
    cells: Sequence[tuple[str, str]],
    num_rounds: int,
    say: Callable[[str], None],
) -> Table:
    """All cells, told as they come. The table's `is_good` says whether all was well."""
    tallies = []
    for service, fault in cells:
        started = time.monotonic()
        tally = await rounds.run(service, fault, num_rounds)
        tallies.append(tally)
        words = "ok" if tally.is_good else "FAILED"
        say(f"{service} {fault}: {words}, {time.monotonic() - started:.1f} s")
        for example in tally.examples[:_MAX_EXAMPLES]:
            say(f"  {example}")
        if len(tally.examples) > _MAX_EXAMPLES:
            say(f"  … and {len(tally.examples) - _MAX_EXAMPLES} more")
    return fault_table(tallies)
