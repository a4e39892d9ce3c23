"""A line of several of each service and one Redis, as real processes with relays between them."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from compose.embedded_redis import server_command
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.chaos.processes import Process
from tests.chaos.relay import Relay, every, local_ports
from tests.fakes.ports import free_port
from tests.fakes.raw_http import Broken, exchange

SERVICES: Final = ("engine", "detok", "tokenizer", "gateway", "redis")
START_SECONDS: Final = 90.0
_PROBE: Final = Path(__file__).parent / "probe"
_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True)
class LineOptions:
    """What the processes are started with; the arguments are added to those of a plain line.

    num_replicas: of engine, detok and tokenizer; there are two gateways and one Redis.
    In `directory` are the processes' logs, and what the probe in them writes.
    """

    model: Path
    directory: Path
    engine_arguments: tuple[str, ...] = ()
    gateway_arguments: tuple[str, ...] = ()
    num_replicas: int = 2


class Replica:
    """A process and the relay that everybody reaches it through."""

    def __init__(self, service: str, index: int) -> None:
        self.service = service
        self.index = index
        self.port = free_port()
        self.relay = Relay(self.port)
        self.process: Process

    @property
    def name(self) -> str:
        return f"{self.service}-{self.index + 1}"


class ChaosLine:
    """`urls` are the gateways', through their relays; `direct_urls` pass them by."""

    def __init__(self, options: LineOptions) -> None:
        self._options = options
        self._replicas = {
            service: [
                Replica(service, index)
                for index in range({"redis": 1, "gateway": 2}.get(service, options.num_replicas))
            ]
            for service in SERVICES
        }

    @property
    def probe_directory(self) -> Path:
        """Where the processes say what tasks they have; see probe/sitecustomize.py."""
        return self._options.directory / "probe"

    @property
    def urls(self) -> list[str]:
        return [f"http://{replica.relay.address}" for replica in self._replicas["gateway"]]

    @property
    def direct_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{replica.port}" for replica in self._replicas["gateway"]]

    @property
    def redis_url(self) -> str:
        """Redis itself, past its relay."""
        return f"redis://127.0.0.1:{self._replicas['redis'][0].port}/0"

    def replicas(self, service: str) -> list[Replica]:
        return self._replicas[service]

    @property
    def all_replicas(self) -> list[Replica]:
        return [replica for replicas in self._replicas.values() for replica in replicas]

    async def start(self) -> None:
        for replica in self.all_replicas:
            await replica.relay.open()
        self.probe_directory.mkdir(parents=True, exist_ok=True)
        for replica in reversed(self.all_replicas):
            command = list(self._command(replica))
            log_path = self._options.directory / f"{replica.name}.log"
            replica.process = Process(replica.name, command, log_path)
            replica.process.start()
        await self.wait_whole()

    async def stop(self) -> None:
        """Ends the processes, callers first, then the relays."""
        for service in ("gateway", "detok", "engine", "tokenizer", "redis"):
            await asyncio.gather(
                *(
                    replica.process.stop()
                    for replica in self._replicas[service]
                    if hasattr(replica, "process")
                )
            )
        for replica in self.all_replicas:
            await replica.relay.close()

    def kill(self) -> None:
        for replica in self.all_replicas:
            if hasattr(replica, "process"):
                replica.process.kill()

    async def wait_whole(self, timeout_seconds: float = START_SECONDS) -> None:
        """Waits until each gateway sees every replica and Redis; TimeoutError with the logs."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            lacking = [await what_lacks(url) for url in self.direct_urls]
            if not any(lacking):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not whole: {'; '.join(lacking)}\n{self.tails()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def engine_loads(self) -> list[common_pb2.EngineLoad]:
        """What each engine says of itself, past the relays."""
        loads = []
        for replica in self._replicas["engine"]:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{replica.port}") as channel:
                stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
                status = await stub.GetStatus(engine_pb2.GetStatusRequest(), timeout=5.0)
                loads.append(status.load)
        return loads

    def tails(self) -> str:
        return "\n".join(replica.process.tail() for replica in self.all_replicas)

    def links_of(self, replica: Replica) -> "Links":
        return Links(self, replica)

    def _command(self, replica: Replica) -> Iterator[str]:
        if replica.service == "redis":
            yield from server_command("127.0.0.1", replica.port)
            return
        module = replica.service if replica.service == "gateway" else f"{replica.service}_svc"
        yield from ("env", f"PYTHONPATH={_PROBE}", f"CHAOS_PROBE={self.probe_directory}")
        yield from (sys.executable, "-m", module, "--port", str(replica.port))
        if replica.service in ("engine", "tokenizer"):
            yield from ("--model", str(self._options.model))
        if replica.service != "tokenizer":
            yield from ("--tokenizer", self._addresses("tokenizer"))
        if replica.service == "engine":
            yield from ("--num-local-engines", str(self._options.num_replicas))
            yield from self._options.engine_arguments
        if replica.service == "gateway":
            yield from ("--detok", self._addresses("detok"))
            yield from ("--engine", self._addresses("engine"))
            yield from ("--redis", f"redis://{self._addresses('redis')}/0")
            yield from self._options.gateway_arguments

    def _addresses(self, service: str) -> str:
        return ",".join(replica.relay.address for replica in self._replicas[service])


class Links:
    """All TCP connections of one replica: those to it, and those it has made to others."""

    def __init__(self, line: ChaosLine, replica: Replica) -> None:
        self._own = replica.relay
        self._replica = replica
        self._others = [
            other.relay for other in line.all_replicas if other.relay is not replica.relay
        ]

    def reset(self) -> int:
        """Ends them with an RST; returns how many there were."""
        ports = local_ports(self._replica.process.pid)
        return self._own.reset() + sum(
            relay.reset(lambda connection: connection.caller_port in ports)
            for relay in self._others
        )

    def hold(self) -> None:
        """A partition: nothing comes through, nothing is refused, until `release`."""
        pid = self._replica.process.pid
        ports = local_ports(pid)
        self._own.hold(every, every)
        for relay in self._others:
            relay.hold(
                lambda connection: connection.caller_port in ports,
                # Looked up anew, which takes milliseconds, only for connections made later.
                lambda connection: connection.caller_port in local_ports(pid),
            )

    def release(self) -> None:
        for relay in (self._own, *self._others):
            relay.release()


@asynccontextmanager
async def chaos_line(options: LineOptions) -> AsyncIterator[ChaosLine]:
    """A line that is whole; nothing of it is left at the end, whatever happens in the block."""
    line = ChaosLine(options)
    try:
        await line.start()
        yield line
    finally:
        try:
            await line.stop()
        finally:
            line.kill()


async def what_lacks(url: str) -> str:
    """What keeps a gateway from seeing the whole line, in words; empty when nothing does."""
    try:
        async with exchange(url, "GET", "/readyz", {}, silence_seconds=2.0) as answer:
            body = json.loads(await answer.body())
    except (Broken, OSError, ValueError) as error:
        return f"{url}: {error}"
    lacking = [
        f"{replica['address']}: {replica['problem']}"
        for role in ("tokenizers", "detoks", "engines")
        for replica in body[role]
        if not replica["ready"]
    ]
    if body["redis"] != "connected":
        lacking.append("redis is away")
    return "; ".join([*body["missing"], *lacking])
