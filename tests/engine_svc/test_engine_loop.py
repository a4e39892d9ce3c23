"""The engine's thread: steps, commands between them, failures, the way to its end."""

import asyncio
import threading
import time

import pytest

from engine_svc.planning.errors import ComputeLost, KvCapacityExceeded, RankLost
from engine_svc.planning.request import FinishReason, Request, RequestOutput
from engine_svc.planning.step import StepPlan
from protos.wire.errors import InternalError, Unavailable
from tests.fakes.drafters import KnowingDrafter
from tests.fakes.engine_loop_driver import Collector, Gate, failing_steps, request, running_loop
from tests.fakes.fake_executor import FakeExecutor, reference_outputs
from tests.fakes.scheduler_driver import greedy
from tests.fakes.waiting import until


async def test_requests_are_answered_and_the_thread_sleeps_while_there_is_none() -> None:
    executor = FakeExecutor()
    async with running_loop(executor) as (loop, collector):
        for key in ("a", "b"):
            loop.submit(request(key))
            received = await collector.finish_of(key)
            expected, _ = reference_outputs(request(key).token_ids, greedy(4), executor.vocab_size)
            assert received.token_ids == expected
            assert received.num_starts == 1
        assert executor.num_steps == 8
        assert loop.load.num_steps == 8
        assert loop.load.num_free_blocks == executor.num_blocks


async def test_drafts_that_come_true_are_published_with_their_step_which_is_timed() -> None:
    executor = FakeExecutor()
    drafter = KnowingDrafter(executor.vocab_size, 8, share_wrong=0.0)
    asked = request("a", max_tokens=20)
    expected, _ = reference_outputs(asked.token_ids, greedy(20), executor.vocab_size)
    drafter.outputs["a"] = expected
    async with running_loop(executor, drafter=drafter, max_draft_tokens=8) as (loop, collector):
        loop.submit(asked)
        assert (await collector.finish_of("a")).token_ids == expected
        assert executor.num_steps < 15
        each = [output for outputs in collector.deliveries for output in outputs]
        assert max(len(output.token_ids) for output in each) > 1
        assert loop.load.num_accepted_draft_tokens == 20 - executor.num_steps
    assert drafter.observed
    assert all(seconds > 0 for _, seconds in drafter.observed)


async def test_a_step_is_published_in_one_delivery_and_the_start_before_the_step_runs() -> None:
    gate = Gate()
    async with running_loop(FakeExecutor(before_step=gate.before_step)) as (loop, collector):
        loop.submit(request("first", max_tokens=1))
        await gate.wait_for_step()
        # They come while a step runs, so the next one has them all.
        for key in ("a", "b", "c"):
            loop.submit(request(key, max_tokens=2))
        gate.open()
        await gate.wait_for_step()
        await until(lambda: collector.received["c"].num_starts == 1)
        # The first's end travels with the news of these, or just before it.
        assert [output.prefill_started for output in collector.deliveries[-1]][-3:] == [True] * 3
        assert not any(collector.received[key].token_ids for key in ("a", "b", "c"))
        gate.open()
        await gate.wait_for_step()
        await until(lambda: collector.received["c"].token_ids)
        assert [len(output.token_ids) for output in collector.deliveries[-1]] == [1, 1, 1]
        gate.open()
        await collector.finish_of("c")
        assert [len(output.token_ids) for output in collector.deliveries[-1]] == [1, 1, 1]


async def test_an_abort_during_a_step_is_answered_after_it_and_no_further_step_is_made() -> None:
    gate = Gate()
    executor = FakeExecutor(before_step=gate.before_step)
    async with running_loop(executor) as (loop, collector):
        loop.submit(request("a", max_tokens=100))
        await gate.wait_for_step()
        loop.abort("a")
        gate.open()
        received = await collector.finish_of("a")
        assert received.finish is not None
        assert received.finish.reason is FinishReason.CANCELLED
        assert executor.num_steps == 1
        assert loop.load.num_free_blocks == executor.num_blocks
        loop.abort("a")
        loop.abort("never heard of")
        loop.submit(request("b", max_tokens=1))
        gate.open()
        await collector.finish_of("b")


async def test_a_refused_request_ends_with_the_refusal() -> None:
    async with running_loop(FakeExecutor(num_blocks=2)) as (loop, collector):
        loop.submit(request("a", length=30, max_tokens=30))
        finish = (await collector.finish_of("a")).finish
        assert finish is not None
        assert isinstance(finish.error, KvCapacityExceeded)


async def test_a_record_that_is_complete_already_is_finished_without_a_step() -> None:
    executor = FakeExecutor()
    async with running_loop(executor) as (loop, collector):
        loop.submit(Request("a", [1, 2, 3, 4], 2, greedy(2)))
        finish = (await collector.finish_of("a")).finish
        assert finish is not None
        assert finish.reason is FinishReason.LENGTH
        assert executor.num_steps == 0


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_bug_22_an_executor_error_ends_its_requests_with_an_error_and_frees_their_blocks(
    num_tokens: int,
) -> None:
    executor = FakeExecutor(before_step=failing_steps(num_tokens))
    async with running_loop(executor) as (loop, collector):
        loop.submit(request("a", max_tokens=10))
        received = await collector.finish_of("a")
        assert received.finish is not None
        assert received.finish.reason is FinishReason.ERROR
        assert isinstance(received.finish.error, InternalError)
        assert len(received.token_ids) == num_tokens
        assert loop.load.num_free_blocks == executor.num_blocks
        # The engine goes on.
        loop.submit(request("b"))
        expected, _ = reference_outputs(request("b").token_ids, greedy(4), executor.vocab_size)
        assert (await collector.finish_of("b")).token_ids == expected
        assert loop.failure is None


async def test_bug_22_other_streams_go_on_when_a_step_without_them_fails() -> None:
    executor = FakeExecutor(before_step=failing_steps(0))
    async with running_loop(executor, max_num_seqs=1) as (loop, collector):
        loop.submit(request("a"))
        loop.submit(request("b"))
        finish_a, finish_b = [(await collector.finish_of(key)).finish for key in "ab"]
        assert finish_a is not None and finish_a.reason is FinishReason.ERROR
        assert finish_b is not None and finish_b.reason is FinishReason.LENGTH


async def test_repeated_failures_end_the_engine_and_every_request_once() -> None:
    gate = Gate()

    def fail(plan: StepPlan) -> None:
        gate.before_step(plan)
        raise RuntimeError("the device is gone")

    executor = FakeExecutor(before_step=fail)
    async with running_loop(executor, max_num_seqs=1) as (loop, collector):
        for key in ("a", "b", "c", "d", "e"):
            loop.submit(request(key))
        gate.open(3)
        await asyncio.wait_for(collector.failed.wait(), 30)
        assert isinstance(loop.failure, RuntimeError)
        finishes = [collector.received[key].finish for key in "abcde"]
        kinds = [type(finish.error) for finish in finishes if finish is not None]
        assert kinds == [InternalError] * 2 + [Unavailable] * 3
        with pytest.raises(Unavailable):
            loop.submit(request("f"))


@pytest.mark.parametrize(
    ("error", "is_at_fault"), [(RankLost("rank 1 is gone"), False), (ComputeLost("ours"), True)]
)
async def test_an_engine_ends_at_once_with_what_computes_and_shows_where_if_it_is_at_fault(
    caplog: pytest.LogCaptureFixture, error: ComputeLost, is_at_fault: bool
) -> None:
    def fail(plan: StepPlan) -> None:
        raise error

    async with running_loop(FakeExecutor(before_step=fail)) as (loop, collector):
        loop.submit(request("a"))
        await asyncio.wait_for(collector.failed.wait(), 30)
        assert loop.failure is error
        finish = collector.received["a"].finish
        assert finish is not None and isinstance(finish.error, Unavailable)
    assert ("Traceback" in caplog.text) == is_at_fault


async def test_steps_quicker_than_their_delivery_wait_for_the_event_loop() -> None:
    executor = FakeExecutor()
    ahead: list[int] = []

    class SlowCollector(Collector):
        def deliver(self, outputs: list[RequestOutput]) -> None:
            super().deliver(outputs)
            time.sleep(0.001)
            ahead.append(executor.num_steps - len(self.received["a"].token_ids))

    async with running_loop(executor, SlowCollector()) as (loop, collector):
        loop.submit(request("a", max_tokens=300))
        assert len((await collector.finish_of("a")).token_ids) == 300
    assert max(ahead) <= 18


async def test_leaving_the_block_ends_what_still_runs() -> None:
    gate = Gate()
    async with running_loop(FakeExecutor(before_step=gate.before_step)) as (loop, collector):
        loop.submit(request("a", max_tokens=1000))
        await gate.wait_for_step()
        asyncio.get_running_loop().call_later(0.05, gate.open, 2000)
    finish = (await collector.finish_of("a")).finish
    assert finish is not None
    assert isinstance(finish.error, Unavailable)
    assert not any(thread.name.startswith("engine") for thread in threading.enumerate())
