"""The engine's thread with two steps in flight: what overlaps; nothing waits, nothing is lost."""

import asyncio

import pytest

from engine_svc.planning.request import FinishReason, Request
from engine_svc.planning.step import SamplingParameters
from protos.wire.errors import InternalError, Unavailable
from tests.fakes.engine_loop_driver import Gate, request, running_loop
from tests.fakes.fake_executor import reference_outputs
from tests.fakes.overlapping_executor import OverlappingExecutor
from tests.fakes.scheduler_driver import greedy
from tests.fakes.waiting import until

TWO = {"max_steps_in_flight": 2}


def expected_outputs(key: str, max_tokens: int = 4) -> list[int]:
    return reference_outputs(request(key).token_ids, greedy(max_tokens), 64)[0]


async def test_a_step_is_launched_before_the_former_is_waited_for_and_no_more_than_one() -> None:
    gate = Gate()
    executor = OverlappingExecutor(before_wait=gate.before_wait)
    async with running_loop(executor, **TWO) as (loop, collector):
        loop.submit(request("a", max_tokens=10))
        for number in range(1, 5):
            await gate.wait_for_step()
            assert executor.num_launched == number + 1
            # What the steps before gave was told while this one runs.
            await until(lambda number=number: len(collector.received["a"].token_ids) == number - 1)
            gate.open()
        gate.open(10)
        assert (await collector.finish_of("a")).token_ids == expected_outputs("a", 10)
        await until(lambda: executor.num_waited_for == 10)
        assert executor.num_launched == 10
        assert executor.num_launched_ahead == 9


async def test_requests_that_come_one_by_one_are_answered_at_once() -> None:
    executor = OverlappingExecutor()
    async with running_loop(executor, **TWO) as (loop, collector):
        for key in ("a", "b", "c"):
            loop.submit(request(key, max_tokens=1))
            assert (await collector.finish_of(key)).token_ids == expected_outputs(key, 1)
        assert executor.num_launched == executor.num_waited_for == 3
        await until(lambda: loop.load.num_free_blocks == executor.num_blocks)


async def test_a_request_that_comes_while_a_step_runs_is_told_that_it_starts_before_that_ends() -> (
    None
):
    gate = Gate()
    executor = OverlappingExecutor(before_wait=gate.before_wait)
    async with running_loop(executor, **TWO) as (loop, collector):
        loop.submit(request("first", max_tokens=20))
        await gate.wait_for_step()
        loop.submit(request("second", max_tokens=1))
        gate.open()
        # Steps 0 and 1 were launched before it came; it is in the third, behind the second.
        await gate.wait_for_step()
        await until(lambda: collector.received["second"].num_starts == 1)
        assert executor.num_waited_for == 2
        gate.open(30)
        await collector.finish_of("first")
        assert (await collector.finish_of("second")).token_ids == expected_outputs("second", 1)


async def test_an_abort_with_steps_in_flight_is_answered_and_what_they_hold_comes_free() -> None:
    gate = Gate()
    executor = OverlappingExecutor(before_wait=gate.before_wait)
    async with running_loop(executor, **TWO) as (loop, collector):
        loop.submit(request("a", max_tokens=100))
        await gate.wait_for_step()
        loop.abort("a")
        loop.submit(request("b", max_tokens=2))
        gate.open()
        finish = (await collector.finish_of("a")).finish
        assert finish is not None and finish.reason is FinishReason.CANCELLED
        gate.open(10)
        assert (await collector.finish_of("b")).token_ids == expected_outputs("b", 2)
        await until(lambda: executor.num_waited_for == executor.num_launched)
        await until(lambda: loop.load.num_free_blocks == executor.num_blocks)


async def test_a_drain_ends_what_waits_at_once_and_what_runs_when_told() -> None:
    gate = Gate()
    executor = OverlappingExecutor(before_wait=gate.before_wait)
    async with running_loop(executor, max_num_seqs=1, **TWO) as (loop, collector):
        for key in ("runs", "waits"):
            loop.submit(request(key, max_tokens=100))
        await gate.wait_for_step()
        loop.fail_all(Unavailable("draining"), running=False)
        gate.open()
        assert isinstance((await collector.finish_of("waits")).finish.error, Unavailable)
        await gate.wait_for_step()
        loop.fail_all(Unavailable("draining"))
        gate.open(10)
        received = await collector.finish_of("runs")
        assert isinstance(received.finish.error, Unavailable)
        assert received.token_ids == expected_outputs("runs", 100)[: len(received.token_ids)]
        await until(lambda: executor.num_waited_for == executor.num_launched)
        await until(lambda: loop.load.num_free_blocks == executor.num_blocks)


async def test_what_a_step_computes_for_a_request_that_has_ended_is_dropped() -> None:
    executor = OverlappingExecutor()
    outputs = expected_outputs("a", 20)
    stop = outputs[5]
    sampling = SamplingParameters(20, temperature=0.0, eos_token_ids=frozenset({stop}))
    async with running_loop(executor, **TWO) as (loop, collector):
        prompt = request("a").token_ids
        loop.submit(Request("a", prompt, len(prompt), sampling))
        received = await collector.finish_of("a")
        assert received.finish is not None and received.finish.reason is FinishReason.STOP
        num_outputs = outputs.index(stop) + 1
        assert received.token_ids == outputs[:num_outputs]
        await until(lambda: executor.num_waited_for == num_outputs + 1)
        await until(lambda: loop.load.num_free_blocks == executor.num_blocks)


@pytest.mark.parametrize("number", [0, 1, 2, 5])
async def test_a_failed_step_ends_the_requests_in_flight_and_the_engine_goes_on(
    number: int,
) -> None:
    # Each of these takes another with it, but they are three failures, not six in a row.
    executor = OverlappingExecutor(failing_steps={number, number + 2})
    async with running_loop(executor, **TWO) as (loop, collector):
        for key in ("a", "b", "c"):
            loop.submit(request(key, max_tokens=8))
            received = await collector.finish_of(key)
            assert received.finish is not None
            outputs = expected_outputs(key, 8)
            assert received.token_ids == outputs[: len(received.token_ids)]
            assert loop.failure is None
        assert len(collector.received["a"].token_ids) == number
        error = collector.received["a"].finish.error  # type: ignore[union-attr]
        assert isinstance(error, InternalError)
        assert collector.received["c"].token_ids == expected_outputs("c", 8)
        await until(lambda: loop.load.num_free_blocks == executor.num_blocks)


async def test_a_launch_that_fails_takes_nothing_from_the_step_before_it() -> None:
    executor = OverlappingExecutor(failing_launches={3})
    async with running_loop(executor, **TWO) as (loop, collector):
        loop.submit(request("a", max_tokens=8))
        received = await collector.finish_of("a")
        assert received.token_ids == expected_outputs("a", 8)[:3]
        assert received.finish is not None
        assert isinstance(received.finish.error, InternalError)
        loop.submit(request("b"))
        assert (await collector.finish_of("b")).token_ids == expected_outputs("b")


async def test_an_executor_that_fails_for_good_ends_the_engine_and_every_request_once() -> None:
    executor = OverlappingExecutor(failing_steps=range(100))
    async with running_loop(executor, max_num_seqs=1, **TWO) as (loop, collector):
        for key in ("a", "b", "c", "d"):
            loop.submit(request(key))
        await asyncio.wait_for(collector.failed.wait(), 30)
        assert loop.failure is not None
        finishes = [collector.received[key].finish for key in "abcd"]
        kinds = [type(finish.error) for finish in finishes if finish is not None]
        assert kinds == [InternalError] * 2 + [Unavailable] * 2


async def test_leaving_the_block_waits_for_all_that_was_launched() -> None:
    gate = Gate()
    executor = OverlappingExecutor(before_wait=gate.before_wait)
    async with running_loop(executor, **TWO) as (loop, collector):
        loop.submit(request("a", max_tokens=1000))
        await gate.wait_for_step()
        asyncio.get_running_loop().call_later(0.05, gate.open, 2000)
    finish = (await collector.finish_of("a")).finish
    assert finish is not None
    assert isinstance(finish.error, Unavailable)
    assert executor.num_in_flight == 0


async def test_a_step_that_hangs_with_another_behind_it_is_noticed() -> None:
    gate = Gate()
    executor = OverlappingExecutor(before_wait=gate.before_wait)
    async with running_loop(executor, step_timeout_seconds=0.1, **TWO) as (loop, collector):
        loop.submit(request("a", max_tokens=1000))
        await asyncio.wait_for(collector.failed.wait(), 30)
        assert loop.hangs
        assert executor.num_launched == 2
        finish = collector.received["a"].finish
        assert finish is not None and isinstance(finish.error, Unavailable)
        gate.open(10_000)
