"""Readiness, agreement on one model, and which replica gets what."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gateway.lanes import Lanes
from gateway.prompt_router import PromptRouter, Route
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2
from protos.wire.errors import InvalidRequest, NotFound, RequestTimeout, Unavailable
from tests.fakes.engine_script import Script
from tests.fakes.gateway_line import IDENTITY, GatewayLine, eventually
from tests.fakes.ports import free_port
from tests.fakes.scripted_detok import DetokScript, ScriptedDetok, output, pieces
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.scripted_tokenizer import ScriptedTokenizer
from tests.fakes.waiting import until

OTHER = common_pb2.ModelIdentity(name="other", fingerprint="0" * 64)
TEXT = tokenizer_pb2.EncodeRequest(text=tokenizer_pb2.TextPrompt(text="hi"))


class Fleet:
    """Services that tests start and stop; leaving the context stops all."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Fleet":
        return self

    async def __aexit__(self, *caught: Any) -> None:
        await self._stack.aclose()

    async def start(self, service: Any, port: int = 0) -> str:
        address: str = await self._stack.enter_async_context(service.serving(port))
        return address


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet() as started:
        yield started


def engine(model: common_pb2.ModelIdentity = IDENTITY, **fields: Any) -> ScriptedEngine:
    return ScriptedEngine(Script(), model=model, **fields)


def detok(model: common_pb2.ModelIdentity = IDENTITY) -> ScriptedDetok:
    return ScriptedDetok(pieces("x"), model)


def route(lanes: Lanes, prompt_token_ids: Sequence[int] = (1,)) -> Route:
    return lanes.router(prompt_token_ids, "", lanes.model().fingerprint).route()


async def test_a_line_is_ready_when_all_three_serve_one_model(fleet: Fleet) -> None:
    port = free_port()
    tokenizer = await fleet.start(ScriptedTokenizer(IDENTITY))
    detokenizer = await fleet.start(detok())
    async with Lanes((tokenizer,), (detokenizer,), (f"127.0.0.1:{port}",)) as lanes:
        await until(lambda: len(lanes.missing()) == 1)
        assert f"engine 127.0.0.1:{port}" in lanes.missing()[0]

        def described() -> dict[str, Any]:
            return {role: each[0] for role, each in lanes.describe().items()}

        await until(lambda: "cannot be reached" in described()["engines"]["problem"])
        ready = {role: each["ready"] for role, each in described().items()}
        assert ready == {"tokenizers": True, "detoks": True, "engines": False}
        assert described()["tokenizers"]["problem"] is None
        with pytest.raises(Unavailable, match="engine"):
            lanes.model()
        with pytest.raises(Unavailable, match="engine"):
            route(lanes)
        await fleet.start(engine(), port)
        await until(lambda: lanes.ready)
        model = lanes.model()
        assert (model.name, model.fingerprint) == (IDENTITY.name, IDENTITY.fingerprint)
        assert model.eos_token_ids == (257,)
        with pytest.raises(NotFound) as caught:
            lanes.model("other")
        assert caught.value.code == "model_not_found"


async def test_a_service_of_another_model_is_not_used_and_named(fleet: Fleet) -> None:
    tokenizer = await fleet.start(ScriptedTokenizer(IDENTITY))
    detokenizer = await fleet.start(detok(OTHER))
    engines = await fleet.start(engine())
    async with Lanes((tokenizer,), (detokenizer,), (engines,)) as lanes:
        expected = f"detok {detokenizer} serves model fingerprint 000000000000, not ffffffffffff"
        await until(lambda: lanes.missing() == [expected])
        assert lanes.describe()["detoks"] == [
            {
                "address": detokenizer,
                "ready": False,
                "problem": "serves model fingerprint 000000000000, not ffffffffffff",
                "fingerprint": OTHER.fingerprint,
            }
        ]


async def test_a_mixed_fleet_serves_the_model_it_has_until_that_is_gone(fleet: Fleet) -> None:
    async with Fleet() as old:
        started = [
            (
                await where.start(ScriptedTokenizer(model)),
                await where.start(detok(model)),
                await where.start(engine(model)),
            )
            for where, model in ((old, IDENTITY), (fleet, OTHER))
        ]
        tokenizers, detoks, engines = zip(*started, strict=True)
        async with Lanes(tokenizers, detoks, engines) as lanes:
            await until(lambda: lanes.ready)
            first = lanes.model().fingerprint
            # More engines of the other do not move the line while its own model is whole.
            assert route(lanes).engine.fingerprint == first
            await old.__aexit__()
            await until(lambda: lanes.ready and lanes.model().name == "other")
            assert route(lanes).engine.address == engines[1]


async def test_a_draining_engine_gets_no_new_work(fleet: Fleet) -> None:
    tokenizer = await fleet.start(ScriptedTokenizer(IDENTITY))
    detokenizer = await fleet.start(detok())
    async with Fleet() as leaving:
        addresses = (await leaving.start(engine()), await fleet.start(engine()))
        async with Lanes((tokenizer,), (detokenizer,), addresses) as lanes:
            await until(lambda: len(lanes.engine_loads()) == 2)
            await leaving.__aexit__()
            await until(lambda: list(lanes.engine_loads()) == [addresses[1]])
            assert lanes.ready
            for number in range(20):
                assert route(lanes, [number]).engine.address == addresses[1]


async def test_the_context_is_that_of_the_smallest_engine(fleet: Fleet) -> None:
    tokenizer = await fleet.start(ScriptedTokenizer(IDENTITY))
    detokenizer = await fleet.start(detok())
    engines = (
        await fleet.start(engine(max_model_len=100)),
        await fleet.start(engine(max_model_len=200)),
    )
    async with Lanes((tokenizer,), (detokenizer,), engines) as lanes:
        await until(lambda: len(lanes.engine_loads()) == 2)
        assert lanes.model().max_model_len == 100


async def test_encode_tries_another_tokenizer_when_one_is_away(fleet: Fleet) -> None:
    detokenizer, engines = await fleet.start(detok()), await fleet.start(engine())
    staying = ScriptedTokenizer(IDENTITY)
    async with Fleet() as leaving:
        tokenizers = (
            await leaving.start(ScriptedTokenizer(IDENTITY)),
            await fleet.start(staying),
        )
        async with Lanes(tokenizers, (detokenizer,), (engines,)) as lanes:
            await until(lambda: all(one["ready"] for one in lanes.describe()["tokenizers"]))
            await leaving.__aexit__()
            for _ in range(4):
                assert list((await lanes.encode(TEXT)).token_ids) == list(b"hi")
            assert len(staying.encoded) == 4


async def test_encode_does_not_repeat_what_is_wrong_with_the_request(fleet: Fleet) -> None:
    tokenizer = ScriptedTokenizer(IDENTITY)
    tokenizer.error = InvalidRequest("No.", param="messages")
    addresses = [await fleet.start(service) for service in (tokenizer, detok(), engine())]
    async with Lanes(*((address,) for address in addresses)) as lanes:
        await until(lambda: lanes.ready)
        with pytest.raises(InvalidRequest):
            await lanes.encode(TEXT)
        assert len(tokenizer.encoded) == 1


async def test_encode_does_not_repeat_what_takes_too_long(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.lane._ENCODE_TIMEOUT_SECONDS", 0.05)
    tokenizers = [ScriptedTokenizer(IDENTITY) for _ in range(2)]
    for tokenizer in tokenizers:
        tokenizer.gate.clear()
    addresses = tuple([await fleet.start(tokenizer) for tokenizer in tokenizers])
    others = [await fleet.start(service) for service in (detok(), engine())]
    async with Lanes(addresses, *((address,) for address in others)) as lanes:
        await until(lambda: all(one["ready"] for one in lanes.describe()["tokenizers"]))
        with pytest.raises(RequestTimeout, match="took longer"):
            await lanes.encode(TEXT)
        assert sum(len(tokenizer.encoded) for tokenizer in tokenizers) == 1
        await until(lambda: sum(tokenizer.num_cancelled for tokenizer in tokenizers) == 1)


async def test_sequences_go_to_the_detokenizer_with_fewest(fleet: Fleet) -> None:
    detoks = [ScriptedDetok(DetokScript([]), IDENTITY) for _ in range(2)]
    tokenizer = await fleet.start(ScriptedTokenizer(IDENTITY))
    addresses = [await fleet.start(one) for one in detoks]
    async with Lanes((tokenizer,), addresses, (await fleet.start(engine()),)) as lanes:
        await until(lambda: lanes.ready)
        await until(lambda: all(one["ready"] for one in lanes.describe()["detoks"]))
        for _ in range(6):
            client = route(lanes).detok.client
            client.submit(detok_pb2.Submit(), lambda output: None)
        await until(lambda: [len(one.live) for one in detoks] == [3, 3])


async def test_load_comes_in_band(line: GatewayLine) -> None:
    load = common_pb2.EngineLoad(num_running=7, num_waiting=3, num_blocks=10, num_free_blocks=5)
    address = line.settings.engine[0]
    line.detok.loads = [detok_pb2.EngineLoadReport(engine_address=address, load=load)]
    gate = asyncio.Event()
    line.detok.script = DetokScript(
        [output("a"), output(finish=common_pb2.FINISH_REASON_STOP)], {1: gate}
    )
    task = asyncio.create_task(line.chat())

    async def scrape() -> str:
        return (await line.client.get("/metrics")).text

    wanted = f'tokenline_engine_running_requests{{engine="{address}"}} 7.0'
    await eventually(scrape, lambda text: wanted in text)
    gate.set()
    assert (await task).status_code == 200


async def test_nothing_found_at_an_address_is_said() -> None:
    async with Lanes(("no-such-host.invalid:1",), ("127.0.0.1:1",), ("127.0.0.1:1",)) as lanes:
        assert "no tokenizer found at no-such-host.invalid:1" in lanes.missing()[0]


async def test_a_lane_that_has_lost_work_is_polled_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.lane._READY_PAUSE_SECONDS", 1000.0)
    addresses = [
        await fleet.start(service) for service in (ScriptedTokenizer(IDENTITY), detok(), engine())
    ]
    async with Lanes(*((address,) for address in addresses)) as lanes:
        await until(lambda: lanes.ready)
        await until(lambda: not route(lanes).suspect)
        lane = route(lanes).engine
        lane.doubt()
        assert lane.suspect
        # It is the only one.
        assert route(lanes).engine is lane
        await until(lambda: not lane.suspect)


async def test_a_suspect_lane_is_avoided_where_there_is_another(fleet: Fleet) -> None:
    tokenizer = await fleet.start(ScriptedTokenizer(IDENTITY))
    detokenizer = await fleet.start(detok())
    engines = (await fleet.start(engine()), await fleet.start(engine()))
    async with Lanes((tokenizer,), (detokenizer,), engines) as lanes:
        await until(lambda: len(lanes.engine_loads()) == 2)
        router = lanes.router([1], "", IDENTITY.fingerprint)
        first = router.route().engine
        assert router.route().engine is first
        second = router.route(avoid={first}).engine
        assert second is not first
        # The choices that come after stay with it.
        assert router.route().engine is second
        second.doubt()
        assert router.route().engine is first


async def test_the_model_is_known_while_the_line_restarts_and_no_longer(fleet: Fleet) -> None:
    tokenizer = await fleet.start(ScriptedTokenizer(IDENTITY))
    detokenizer = await fleet.start(detok())
    async with Fleet() as leaving:
        engines = await leaving.start(engine())
        async with Lanes((tokenizer,), (detokenizer,), (engines,), 3.0) as lanes:
            assert not lanes.recovering
            await until(lambda: lanes.ready)
            await leaving.__aexit__()
            await until(lambda: not lanes.ready)
            assert lanes.model().fingerprint == IDENTITY.fingerprint
            assert lanes.missing()
            await until(lambda: not lanes.recovering)
            with pytest.raises(Unavailable, match="not ready"):
                lanes.model()


async def test_sequences_of_a_model_go_to_no_replica_of_another(fleet: Fleet) -> None:
    async with Fleet() as old:
        pairs = [
            (await where.start(ScriptedTokenizer(model)), await where.start(detok(model)))
            for where, model in ((old, IDENTITY), (fleet, OTHER))
        ]
        tokenizers, detoks = zip(*pairs, strict=True)
        engines = (await old.start(engine()), await fleet.start(engine(OTHER)))
        async with Lanes(tokenizers, detoks, engines) as lanes:
            await until(lambda: lanes.ready)
            router = lanes.router([1], "", IDENTITY.fingerprint)
            await until(lambda: _can_route(router))
            await old.__aexit__()
            await until(lambda: not _can_route(router))
            await until(lambda: lanes.ready and lanes.model().name == OTHER.name)
            with pytest.raises(Unavailable):
                router.route()


def _can_route(router: PromptRouter) -> bool:
    try:
        router.route()
    except Unavailable:
        return False
    return True
