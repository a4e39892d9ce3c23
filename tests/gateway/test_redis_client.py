"""Redis URLs of every form, against real servers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis

from gateway.redis_batch import Batch
from gateway.redis_client import open_redis
from protos.wire.errors import StartupError, Unavailable
from tests.chaos.relay import Relay
from tests.fakes.gateway_line import eventually, gateway_line, whole_text
from tests.fakes.ledgers import FakeRun, ledger_side
from tests.fakes.ports import free_port
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until


@pytest.fixture
def sentinel(valkey: Valkey, tmp_path: Path) -> Iterator[Valkey]:
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(f"sentinel monitor main 127.0.0.1 {valkey.port} 1\n")
    with Valkey(tmp_path, [str(configuration), "--sentinel"], is_sentinel=True) as server:
        yield server


@contextmanager
def cluster_node(directory: Path, bus_port: int) -> Iterator[Valkey]:
    # The default bus port, 10,000 above, need not exist.
    directory.mkdir()
    with Valkey(directory, ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)]) as node:
        yield node


@asynccontextmanager
async def node_client(node: Valkey) -> AsyncIterator[Any]:
    async with Redis(port=node.port) as client:
        yield client


@dataclass(frozen=True)
class Cluster:
    """Two nodes, each with half of the keys."""

    nodes: tuple[Valkey, Valkey]

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    bus_ports = free_port(), free_port()
    with (
        cluster_node(tmp_path / "first", bus_ports[0]) as first,
        cluster_node(tmp_path / "second", bus_ports[1]) as second,
    ):
        for node, slots in ((first, (0, 8191)), (second, (8192, 16383))):
            async with node_client(node) as client:
                await client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
                if node is second:
                    await client.execute_command(
                        "CLUSTER", "MEET", "127.0.0.1", first.port, bus_ports[0]
                    )
        for node in (first, second):
            async with node_client(node) as client, asyncio.timeout(20):
                while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
                    await asyncio.sleep(0.01)
        yield Cluster((first, second))


async def works(url: str, prefix: str) -> None:
    """A gateway on `url` writes records, lists them and hears cancels."""
    async with gateway_line(url, redis_prefix=prefix) as line:
        line.client.headers["x-request-id"] = "one"
        assert whole_text(await line.chat()) == "Hello there"
        async with asyncio.timeout(20):
            while (await line.client.get("/readyz")).json()["redis"] != "connected":
                await asyncio.sleep(0.01)
        assert (await line.record("one"))["state"] == "finished"
        assert (await line.client.get("/v1/requests")).status_code == 200


async def keeps_runs(url: str, prefix: str) -> None:
    """Runs of many names are claimed, kept, taken over and ended by two gateways on `url`."""
    async with ledger_side(url, "b:1#bbbbbbbb01", prefix) as two:
        async with ledger_side(url, "a:1#aaaaaaaa01", prefix) as one:
            for number in range(16):
                request_id = f"run-{number}"
                claim = await one.ledger.claim(f"d{number}", "body", request_id, b"call")
                one.begin(request_id, incarnation=claim.incarnation)
                run = FakeRun(request_id, claim.incarnation, written=[b"a", b"\xff"])
                one.ledger.track(run, b"call")
            for record in list(one.records):
                one.ledger.release(record.id, 1)
                one.finish(record, "cancelled")
        for number in range(16):
            stored = await two.ledger.find_run(f"run-{number}")
            assert stored is not None
            assert (stored.batches, stored.owner_alive) == ([b"a", b"\xff"], False)
            assert await two.ledger.take_over(stored) == 2
            run = FakeRun(stored.request_id, stored.incarnation, 2, [b"c"], ended=True)
            two.ledger.track(run, b"call")
            ended = await eventually(
                partial(two.ledger.find_run, stored.request_id),
                lambda stored: stored is not None and stored.ended,
            )
            assert ended is not None
            assert ended.batches == [b"c"]
            again = await two.ledger.claim(f"d{number}", "body", "x", b"")
            assert (again.is_new, again.request_id) == (False, stored.request_id)


async def test_a_unix_socket(tmp_path: Path) -> None:
    socket = tmp_path / "valkey.sock"
    with Valkey(tmp_path, ["--unixsocket", str(socket)]):
        await works(f"unix://{socket}", "unix:")


async def test_a_sentinel_group(sentinel: Valkey) -> None:
    await works(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0", "sentinel:")
    await keeps_runs(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0", "sentinel:runs:")


async def test_a_cluster(cluster: Cluster) -> None:
    await works(cluster.url, "cluster:")
    await keeps_runs(cluster.url, "cluster:runs:")


async def test_a_cluster_that_is_gone_and_comes_back(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with ledger_side(cluster.url, "a:1#aaaaaaaa01", "away:") as side:
        await until(lambda: side.ledger.available)
        for node in cluster.nodes:
            node.kill()
        await until(lambda: not side.ledger.available)
        side.begin("one")
        with pytest.raises(Unavailable):
            await side.ledger.claim("digest", "body", "two", b"call")
        with pytest.raises(Unavailable):
            await side.ledger.find("two")
        for node in cluster.nodes:
            node.start()
        await until(lambda: side.ledger.available and side.ledger._writer.num_unwritten == 0)
        assert await side.ledger.find("one") is not None
    said = [record.getMessage()[:13] for record in caplog.records if "redis_state" in record.name]
    assert said == ["Redis is away", "Redis is back"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "url", ["nonsense", "http://x", "redis+sentinel://127.0.0.1:1", "redis://h:x"]
)
async def test_a_url_that_cannot_be_read_is_said_without_its_password(url: str) -> None:
    with pytest.raises(StartupError):
        async with open_redis(url):
            pass
    with pytest.raises(StartupError) as caught:
        async with open_redis("http://me:secret@host"):
            pass
    assert "secret" not in str(caught.value)


@contextmanager
def relay_in_a_thread(target_port: int) -> Iterator[tuple[Relay, asyncio.AbstractEventLoop]]:
    relay = Relay(target_port)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(relay.open())
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield relay, loop
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            runner.run(relay.close())


def test_commands_outlive_a_reset_of_every_connection(valkey: Valkey) -> None:
    num_rounds, num_callers = 10, 48

    async def call(client: Any, number: int) -> list[Any]:
        # Some wait for their replies at the moment of the reset, some come just after.
        await asyncio.sleep(number / num_callers * 0.02)
        batch = Batch(client)
        batch.command("SET", f"key {number}", "value" * 1000)
        batch.command("STRLEN", f"key {number}")
        return await batch.execute()

    async def calls(relay: Relay, loop: asyncio.AbstractEventLoop) -> list[Any]:
        replies: list[Any] = []
        async with open_redis(f"redis://{relay.address}/0") as client:
            for _ in range(num_rounds):
                callers = [asyncio.create_task(call(client, i)) for i in range(num_callers)]
                await asyncio.sleep(0.01)
                loop.call_soon_threadsafe(relay.reset)
                replies += await asyncio.gather(*callers, return_exceptions=True)
        return replies

    # The loop that gateways run on: a write to a lost connection fails otherwise there.
    with (
        relay_in_a_thread(valkey.port) as (relay, loop),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        replies = runner.run(calls(relay, loop))
    assert replies == [[True, 5000]] * num_rounds * num_callers
