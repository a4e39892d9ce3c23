"""Redis URLs of every form, against real servers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.redis_client import open_redis
from protos.wire.errors import StartupError
from tests.fakes.gateway_line import gateway_line, whole_text
from tests.fakes.valkey import Valkey, free_port


@pytest.fixture
def sentinel(valkey: Valkey, tmp_path: Path) -> Iterator[Valkey]:
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(f"sentinel monitor main 127.0.0.1 {valkey.port} 1\n")
    with Valkey(tmp_path, [str(configuration), "--sentinel"], is_sentinel=True) as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Valkey]:
    # The default bus port, 10,000 above, need not exist.
    bus = str(free_port())
    with Valkey(tmp_path, ["--cluster-enabled", "yes", "--cluster-port", bus]) as server:
        yield server


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


async def test_a_unix_socket(tmp_path: Path) -> None:
    socket = tmp_path / "valkey.sock"
    with Valkey(tmp_path, ["--unixsocket", str(socket)]):
        await works(f"unix://{socket}", "unix:")


async def test_a_sentinel_group(sentinel: Valkey) -> None:
    await works(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0", "sentinel:")


async def test_a_cluster(cluster: Valkey) -> None:
    async with Redis(port=cluster.port) as client:
        await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        async with asyncio.timeout(20):
            while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
                await asyncio.sleep(0.01)
    await works(f"redis+cluster://127.0.0.1:{cluster.port}", "cluster:")


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
