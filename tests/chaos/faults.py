"""What is done to one replica of a service, and how long it is away because of it."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.chaos.line import ChaosLine, Replica
from tests.fakes.raw_http import Broken, exchange

# How long a stopped process stands still, and a partition lasts.
FAULT_SECONDS: Final = 5.0
_RESTART_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02


async def kill(line: ChaosLine, replica: Replica) -> float:
    """SIGKILL, and the restart that follows."""
    return await _until_restarted(replica, signal.SIGKILL)


async def restart(line: ChaosLine, replica: Replica) -> float:
    """SIGTERM, so that it drains, and a start anew."""
    return await _until_restarted(replica, signal.SIGTERM)


async def stop(line: ChaosLine, replica: Replica) -> float:
    """SIGSTOP, and SIGCONT after FAULT_SECONDS."""
    replica.process.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(FAULT_SECONDS)
    finally:
        replica.process.send(signal.SIGCONT)
    return FAULT_SECONDS


async def reset(line: ChaosLine, replica: Replica) -> float:
    """An RST on each of its TCP connections."""
    line.links_of(replica).reset()
    return 0.0


async def partition(line: ChaosLine, replica: Replica) -> float:
    """Its connections carry nothing for FAULT_SECONDS, then go on."""
    links = line.links_of(replica)
    links.hold()
    try:
        await asyncio.sleep(FAULT_SECONDS)
    finally:
        links.release()
    return FAULT_SECONDS


async def kill_rank(line: ChaosLine, replica: Replica) -> float:
    """SIGKILL to one of an engine's other ranks: the engine then ends by itself."""
    return await _until_restarted(replica, signal.SIGKILL, _a_rank_of(replica))


async def stop_rank(line: ChaosLine, replica: Replica) -> float:
    """SIGSTOP to one of them, for good: the engine ends when a step has taken too long."""
    return await _until_restarted(replica, signal.SIGSTOP, _a_rank_of(replica))


async def nothing(line: ChaosLine, replica: Replica) -> float:
    """No fault: what differs all the same is no fault's doing."""
    return 0.0


async def restart_all(line: ChaosLine) -> None:
    """A rolling restart: each process in turn, the next once the line is whole again."""
    for replica in line.all_replicas:
        await restart(line, replica)
        await line.wait_whole()


# Each gives the seconds that the replica was away: "the restart itself".
FAULTS: Final[dict[str, Callable[[ChaosLine, Replica], Awaitable[float]]]] = {
    "kill": kill,
    "stop": stop,
    "restart": restart,
    "reset": reset,
    "partition": partition,
}

# Of an engine of several ranks.
RANK_FAULTS: Final[dict[str, Callable[[ChaosLine, Replica], Awaitable[float]]]] = {
    "kill-rank": kill_rank,
    "stop-rank": stop_rank,
}


def _a_rank_of(replica: Replica) -> int:
    return psutil.Process(replica.process.pid).children()[-1].pid


async def _until_restarted(replica: Replica, number: signal.Signals, pid: int = 0) -> float:
    """Sends a signal to the replica's process, or to another one of its own."""
    started = time.monotonic()
    num_starts = replica.process.num_starts
    if pid:
        os.kill(pid, number)
    else:
        replica.process.send(number)
    while not (replica.process.num_starts > num_starts and await serves(replica)):
        if time.monotonic() - started > _RESTART_SECONDS:
            raise TimeoutError(f"{replica.name} did not come back\n{replica.process.tail()}")
        await asyncio.sleep(_POLL_SECONDS)
    return time.monotonic() - started


async def serves(replica: Replica) -> bool:
    """Whether the process answers that it is ready, asked past its relay."""
    address = f"127.0.0.1:{replica.port}"
    if replica.service == "gateway":
        with suppress(Broken, OSError):
            async with exchange(
                f"http://{address}", "GET", "/readyz", {}, silence_seconds=1.0
            ) as answer:
                return answer.status == 200
        return False
    if replica.service == "redis":
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", replica.port)
            try:
                writer.write(b"PING\r\n")
                return (await asyncio.wait_for(reader.readline(), 1.0)).startswith(b"+PONG")
            finally:
                writer.close()
        return False
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with suppress(grpc.aio.AioRpcError):
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False
