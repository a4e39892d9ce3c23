"""Fixtures of the gateway's tests: one Valkey for all, one line per test."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from redis.asyncio import Redis

from tests.fakes.gateway_line import GatewayLine, gateway_line
from tests.fakes.ledgers import OWNER_A, OWNER_B, LedgerSide, ledger_side
from tests.fakes.openai_client import client_of
from tests.fakes.valkey import Valkey
from tests.fakes.waiting import until

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """One that no other test uses."""
    with Valkey(tmp_path) as server:
        yield server


@pytest.fixture
def redis_prefix() -> str:
    """Keeps the keys of one test from those of others."""
    return f"test{next(_prefixes)}:"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_line(valkey: Valkey) -> AsyncIterator[GatewayLine]:
    """For modules whose tests leave nothing behind: they reset it rather than start one each."""
    async with gateway_line(valkey.url, redis_prefix=f"module{next(_prefixes)}:") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tool_line(valkey: Valkey) -> AsyncIterator[GatewayLine]:
    """As module_line, with a model that thinks and calls tools."""
    settings: Any = {"tool_call_format": "hermes", "reasoning": "on"}
    async with gateway_line(
        valkey.url, redis_prefix=f"module{next(_prefixes)}:", **settings
    ) as running:
        yield running


@pytest.fixture
async def line(valkey: Valkey, redis_prefix: str) -> AsyncIterator[GatewayLine]:
    async with gateway_line(valkey.url, redis_prefix=redis_prefix) as running:
        yield running


@pytest.fixture
async def redis(valkey: Valkey) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey.url) as client:
        yield client


@pytest.fixture
async def one(valkey: Valkey, redis_prefix: str) -> AsyncIterator[LedgerSide]:
    """The ledger of one gateway."""
    async with ledger_side(valkey.url, OWNER_A, redis_prefix) as side:
        await until(lambda: side.ledger.available)
        yield side


@pytest.fixture
async def two(valkey: Valkey, redis_prefix: str) -> AsyncIterator[LedgerSide]:
    """The ledger of another, on the same Redis."""
    async with ledger_side(valkey.url, OWNER_B, redis_prefix) as side:
        await until(lambda: side.ledger.available)
        yield side


@pytest_asyncio.fixture(loop_scope="module")
async def client(line: GatewayLine) -> AsyncIterator[AsyncOpenAI]:
    """The client that OpenAI publishes, of the `line` of a module whose tests share a loop."""
    async with client_of(line.url) as made:
        yield made
