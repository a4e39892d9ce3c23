"""The launcher waits for every gateway and every replica, and says what is missing meanwhile."""

import asyncio

from compose.readiness import Readiness, wait_until_ready
from tests.fakes.http_app import serve_app
from tests.fakes.stand_in_gateway import StandInGateway
from tests.fakes.waiting import until


async def test_it_waits_for_every_gateway_and_tells_each_change_once() -> None:
    first, second = StandInGateway(), StandInGateway()
    second.missing = ["engine 127.0.0.1:1 loads its model"]
    seen: list[str] = []
    with serve_app(first.app) as first_url, serve_app(second.app) as second_url:
        waiting = asyncio.create_task(wait_until_ready([first_url, second_url], {}, seen.append))
        await until(lambda: len(seen) == 1)
        second.missing = ["detok 127.0.0.1:2 is starting", "redis"]
        await until(lambda: len(seen) == 2)
        assert not waiting.done()
        second.missing = []
        assert await waiting == Readiness("stand-in", has_redis=True)
    assert seen == [
        "waiting: engine 127.0.0.1:1 loads its model",
        "waiting: detok 127.0.0.1:2 is starting; redis",
    ]


async def test_it_waits_for_all_the_replicas_that_were_asked_for() -> None:
    gateway = StandInGateway()
    seen: list[str] = []
    with serve_app(gateway.app) as url:
        waiting = asyncio.create_task(wait_until_ready([url], {"engines": 2}, seen.append))
        await until(lambda: bool(seen))
        gateway.ready_engines = [True, False]
        assert not waiting.done()
        gateway.ready_engines = [True, True]
        assert (await waiting).model == "stand-in"
    assert seen == ["waiting: 1 of 2 engines ready"]


async def test_redis_is_waited_for_a_while() -> None:
    gateway = StandInGateway()
    gateway.redis = "away"
    seen: list[str] = []
    with serve_app(gateway.app) as url:
        assert await wait_until_ready([url], {}, seen.append, redis_seconds=0.05) == Readiness(
            "stand-in", has_redis=False
        )
        waiting = asyncio.create_task(wait_until_ready([url], {}, seen.append, redis_seconds=60))
        await until(lambda: len(seen) == 2)
        gateway.redis = "connected"
        assert (await waiting).has_redis
    assert seen == ["waiting: Redis is away"] * 2


async def test_a_gateway_that_does_not_listen_yet_is_waited_for() -> None:
    seen: list[str] = []
    waiting = asyncio.create_task(wait_until_ready(["http://127.0.0.1:9"], {}, seen.append))
    await until(lambda: bool(seen))
    waiting.cancel()
    assert seen == ["waiting: the gateway does not answer yet"]
