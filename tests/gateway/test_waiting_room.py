"""The waiting room by itself: what goes on from another gateway, engines that are away."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.chat_reducer import TextReading
from gateway.engine_places import EnginePlaces
from gateway.errors import QueueFull
from gateway.job import Job
from gateway.lane import EngineLane
from gateway.lanes import LineModel
from gateway.live_request import LiveRequest
from gateway.queue_bounds import QueueBounds
from gateway.waiting_room import WaitingRoom
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from tests.fakes.waiting import until

JOB = Job(
    request_id="r",
    traceparent="",
    endpoint="/v1/completions",
    model=LineModel("m", "f", (), 100, 100),
    streams=False,
    prompts=((1, 2, 3),),
    prompt_param="prompt",
    num_choices=1,
    sampling=common_pb2.SamplingParameters(),
    seed=0,
    max_tokens=10,
    max_tokens_param="max_tokens",
    stop=(),
    bad_words=(),
    ignore_eos=False,
    include_stop_str_in_output=False,
    skip_special_tokens=True,
    priority=0,
    cache_salt="",
    started_at=time.time(),
    timeout_seconds=None,
    reading=TextReading(),
)
# What the room tells a request: none of it matters here.
REQUEST = cast(
    LiveRequest,
    SimpleNamespace(
        enter=lambda stage: None, on_cancel=lambda action: None, on_timeout=lambda action: None
    ),
)


def engine(max_num_seqs: int, **load: int) -> EngineLane:
    status = engine_pb2.GetStatusResponse(
        max_num_seqs=max_num_seqs, max_model_len=100, block_size=10
    )
    fields: dict[str, Any] = {
        "address": f"engine{max_num_seqs}",
        "status": status,
        "load": common_pb2.EngineLoad(**load),
        "num_own_sequences": 0,
    }
    return cast(EngineLane, SimpleNamespace(**fields))


def room_of(*engines: EngineLane, max_sequences: int = 1) -> WaitingRoom:
    places = EnginePlaces(lambda: engines)
    return WaitingRoom(
        places, QueueBounds(places, max_sequences, 0), num_sampled=lambda: 0, recovery_seconds=60.0
    )


async def wait_for_turn(room: WaitingRoom, lane: EngineLane, **fields: Any) -> None:
    goes_on = fields.pop("goes_on", False)
    visit = room.visit(replace(JOB, **fields), goes_on=goes_on)
    room.come_in(visit)
    async with room.turn(visit, REQUEST, 3, 10):
        lane.num_own_sequences += visit.num_sequences


async def test_what_goes_on_waits_for_nobody() -> None:
    lane = engine(1)
    room = room_of(lane)
    for number in range(3):
        await wait_for_turn(room, lane, request_id=f"r{number}")
    waiting = asyncio.create_task(wait_for_turn(room, lane, request_id="waiting"))
    await until(lambda: room.queue.num_requests == 1)
    with pytest.raises(QueueFull):
        await wait_for_turn(room, lane, request_id="refused")
    await wait_for_turn(room, lane, request_id="continued", goes_on=True)
    assert lane.num_own_sequences == 4
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert room.queue.num_requests == 0


async def test_sequences_of_other_gateways_take_places_too() -> None:
    lane = engine(4, num_running=4)
    places = EnginePlaces(lambda: [lane])
    assert places.num_free == 2
    # They are not in the engine's report yet.
    lane.num_own_sequences = 2
    assert places.num_free == 0
    lane.load = common_pb2.EngineLoad(num_running=4, num_waiting=1)
    assert places.num_free == 1
    # Its own queue is long although it runs few: it is short of something else than places.
    lane.load = common_pb2.EngineLoad(num_running=1, num_waiting=4)
    assert places.num_free == 0


async def test_what_the_engines_hold_is_remembered_while_they_are_away() -> None:
    engines = [engine(8, num_blocks=5), engine(4, num_blocks=1000)]
    for lane in engines:
        assert lane.status is not None
        lane.status.load.CopyFrom(lane.load)
    places = EnginePlaces(lambda: engines)
    assert (places.capacity, places.num_kv_tokens) == (12, 50 + 400)
    engines.clear()
    assert (places.capacity, places.num_kv_tokens) == (12, 50 + 400)
    assert places.num_free == 0
    assert not places.has_engines
    bounds = QueueBounds(places, 0, 0)
    assert (bounds.max_sequences, bounds.max_tokens) == (8, 282)
    assert (bounds.newcomer_sequences, bounds.newcomer_tokens) == (4, 141)
