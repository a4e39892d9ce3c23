"""The engine service over real sockets, on a fake executor."""

import asyncio
import random
import threading
import time

import pytest

from engine_svc.planning.step import SamplingParameters, StepPlan
from protos.common.v1 import common_pb2
from tests.fakes.engine_server import EngineClient, proto_sampling, run_engine
from tests.fakes.fake_executor import FakeExecutor, reference_outputs
from tests.fakes.scheduler_driver import greedy
from tests.fakes.waiting import until


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(7 * index + 13 * number + 1) % 64 for index in range(length)]


def take_a_millisecond(plan: StepPlan) -> None:
    """For steps that no machine makes faster than a test that means to end them midway."""
    time.sleep(0.001)


async def wait_until_idle(client: EngineClient, seconds: float) -> common_pb2.EngineLoad:
    """The load once nothing runs or waits; AssertionError when that takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        load = (await client.status()).load
        if load.num_running == load.num_waiting == 0:
            return load
        assert time.monotonic() < deadline, f"still {load.num_running} run, {load.num_waiting} wait"


async def test_a_sequence_is_answered_with_one_start_its_tokens_and_one_finish() -> None:
    executor = FakeExecutor()
    sampling = SamplingParameters(max_tokens=12, seed=9, logprobs=True, top_logprobs=1)
    async with run_engine(executor) as engine:
        for num_cached_tokens in (0, 32):
            answer = await engine.client.generate(
                prompt_of(40), proto_sampling(12, temperature=1.0, seed=9, logprobs=True)
            )
            assert answer.token_ids == reference_outputs(prompt_of(40), sampling, 64)[0]
            assert [output.prefill_started for output in answer.outputs].count(True) == 1
            assert sum(output.num_cached_tokens for output in answer.outputs) == num_cached_tokens
            assert sum(len(output.logprobs) for output in answer.outputs) == 12
            assert answer.finish.reason == common_pb2.FINISH_REASON_LENGTH


async def test_the_status_tells_the_model_its_limits_and_the_load() -> None:
    executor = FakeExecutor(num_blocks=10, max_model_len=4096)
    async with run_engine(executor, max_num_seqs=3) as engine:
        status = await engine.client.status()
    assert (status.model.name, status.model.fingerprint) == ("fake", "0123")
    assert (status.vocab_size, status.max_num_seqs, status.block_size) == (64, 3, 16)
    assert status.max_model_len == 160, "capped to what the KV pool holds"
    assert (status.load.num_blocks, status.load.num_free_blocks) == (10, 10)


async def test_bad_requests_end_with_an_error_that_names_the_field() -> None:
    async with run_engine(FakeExecutor(num_blocks=8, max_model_len=512)) as engine:
        for prompt, sampling, code, param in [
            ([64], proto_sampling(1), "", "prompt_token_ids"),
            ([1], proto_sampling(0), "", "max_tokens"),
            (prompt_of(500), proto_sampling(13), "context_length_exceeded", "max_tokens"),
            (prompt_of(100), proto_sampling(100), "kv_capacity", "max_tokens"),
        ]:
            answer = await engine.client.generate(prompt, sampling)
            assert answer.finish.reason == common_pb2.FINISH_REASON_ERROR
            assert answer.finish.error.kind == common_pb2.ERROR_KIND_INVALID_REQUEST
            assert (answer.finish.error.code, answer.finish.error.param) == (code, param)
        assert (await engine.client.generate([1], proto_sampling(3))).token_ids


async def test_a_full_queue_is_told_as_overload() -> None:
    executor = FakeExecutor(before_step=take_a_millisecond)
    async with run_engine(executor, max_num_seqs=1, max_waiting=2) as engine:
        answers = [engine.client.submit([1], proto_sampling(500))[1] for _ in range(20)]
        await asyncio.gather(*(answer.ended.wait() for answer in answers))
        kinds = [answer.finish.error.kind for answer in answers if answer.finish.HasField("error")]
        assert set(kinds) == {common_pb2.ERROR_KIND_OVERLOADED}
        assert len(kinds) < len(answers)


async def test_bug_63_engine_part_three_hundred_aborts_leave_nothing_running_and_nothing_held() -> (
    None
):
    executor = FakeExecutor(num_blocks=700, max_model_len=20_000, before_step=take_a_millisecond)
    rng = random.Random(63)
    async with run_engine(executor) as engine:
        client = engine.client
        steps_when_told = 0

        async def abandon(number: int) -> None:
            nonlocal steps_when_told
            sequence_id, answer = client.submit(prompt_of(20, number), proto_sampling(10_000))
            num_outputs = rng.randint(0, 3)
            await until(lambda: len(answer.outputs) >= num_outputs)
            client.stream.abort(sequence_id)
            await answer.ended.wait()
            steps_when_told = executor.num_steps
            assert answer.finish.reason == common_pb2.FINISH_REASON_CANCELLED

        for begin in range(0, 300, 10):
            await asyncio.gather(*(abandon(number) for number in range(begin, begin + 10)))
        load = await wait_until_idle(client, seconds=1.0)
        assert load.num_free_blocks == load.num_blocks == 700
        assert executor.num_steps - steps_when_told <= 1
        answer = await client.generate(prompt_of(20), proto_sampling(20))
        assert answer.token_ids == reference_outputs(prompt_of(20), greedy(20), 64)[0]


async def test_bug_63_a_stream_that_closes_takes_its_sequences_with_it() -> None:
    executor = FakeExecutor(num_blocks=700, max_model_len=20_000, before_step=take_a_millisecond)
    async with run_engine(executor) as engine:
        answers = [
            engine.client.submit(prompt_of(20, number), proto_sampling(10_000))[1]
            for number in range(20)
        ]
        await until(lambda: bool(answers[0].token_ids))
        await engine.client.stream.__aexit__(None, None, None)
        load = await wait_until_idle(engine.client, seconds=1.0)
        assert load.num_free_blocks == 700


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_bug_22_an_engine_error_is_told_and_the_engine_goes_on(num_tokens: int) -> None:
    steps = iter(range(1000))

    def before_step(plan: StepPlan) -> None:
        if next(steps) == num_tokens:
            raise RuntimeError("the device is unwell")

    async with run_engine(FakeExecutor(before_step=before_step)) as engine:
        answer = await engine.client.generate(prompt_of(5), proto_sampling(10))
        assert len(answer.token_ids) == num_tokens
        assert answer.finish.reason == common_pb2.FINISH_REASON_ERROR
        assert answer.finish.error.kind == common_pb2.ERROR_KIND_INTERNAL
        assert answer.finish.error.code == "engine_failed"
        assert "unwell" not in answer.finish.error.message
        load = await wait_until_idle(engine.client, seconds=1.0)
        assert load.num_free_blocks == load.num_blocks
        answer = await engine.client.generate(prompt_of(5), proto_sampling(10))
        assert answer.finish.reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_nan_in_one_row_fails_that_sequence_alone() -> None:
    async with run_engine(FakeExecutor(nan_token_id=63)) as engine:
        (_, bad), (_, good) = [
            engine.client.submit(prompt, proto_sampling(5)) for prompt in ([63, 1], [1, 2])
        ]
        await asyncio.gather(bad.ended.wait(), good.ended.wait())
        assert bad.finish.error.code == "sampling_failed"
        assert good.token_ids == reference_outputs([1, 2], greedy(5), 64)[0]


async def test_an_engine_that_cannot_go_on_stops_serving_and_says_why() -> None:
    def before_step(plan: StepPlan) -> None:
        raise RuntimeError("the device is gone")

    async with run_engine(FakeExecutor(before_step=before_step), max_num_seqs=1) as engine:
        answers = [engine.client.submit([1], proto_sampling(5))[1] for _ in range(5)]
        await asyncio.wait_for(engine.stop.wait(), 30)
        await asyncio.gather(*(answer.ended.wait() for answer in answers))
        assert {answer.finish.reason for answer in answers} == {common_pb2.FINISH_REASON_ERROR}
        assert isinstance(engine.service.failure, RuntimeError)


async def test_draining_refuses_new_sequences_and_lets_running_ones_end() -> None:
    async with run_engine(FakeExecutor()) as engine:
        _, running = engine.client.submit([1, 2], proto_sampling(300))
        await until(lambda: bool(running.token_ids))
        draining = asyncio.create_task(engine.service.drain(30.0))
        await asyncio.sleep(0)
        refused = await engine.client.generate([1, 2], proto_sampling(5))
        assert refused.finish.error.kind == common_pb2.ERROR_KIND_UNAVAILABLE
        assert refused.finish.error.code == "engine_draining"
        await draining
        await running.ended.wait()
        assert running.finish.reason == common_pb2.FINISH_REASON_LENGTH
        assert len(running.token_ids) == 300


async def test_what_still_runs_after_the_grace_time_ends_as_unavailable() -> None:
    executor = FakeExecutor(num_blocks=700, max_model_len=20_000, before_step=take_a_millisecond)
    async with run_engine(executor, drain_seconds=0.05) as engine:
        _, running = engine.client.submit([1, 2], proto_sampling(11_000))
        await until(lambda: bool(running.token_ids))
        engine.stop.set()
        await running.ended.wait()
        assert running.finish.error.kind == common_pb2.ERROR_KIND_UNAVAILABLE
        assert running.finish.error.code == "engine_draining"
        assert 0 < len(running.token_ids) < 11_000


async def test_what_waits_at_the_start_of_a_drain_ends_at_once_and_what_runs_goes_on() -> None:
    executor = FakeExecutor(num_blocks=700, max_model_len=20_000, before_step=take_a_millisecond)
    async with run_engine(executor, max_num_seqs=1, drain_seconds=60.0) as engine:
        sequence_id, running = engine.client.submit([1, 2], proto_sampling(11_000))
        await until(lambda: bool(running.token_ids))
        _, waiting = engine.client.submit([1, 2], proto_sampling(5))
        await until(lambda: engine.service.num_live == 2)
        engine.stop.set()
        await waiting.ended.wait()
        assert waiting.finish.error.code == "engine_draining"
        assert waiting.token_ids == [] and not waiting.outputs[0].prefill_started
        num_tokens = len(running.token_ids)
        await until(lambda: len(running.token_ids) > num_tokens)
        engine.client.stream.abort(sequence_id)
        await running.ended.wait()
        assert running.finish.reason == common_pb2.FINISH_REASON_CANCELLED


async def test_a_sequence_takes_no_longer_than_it_may() -> None:
    executor = FakeExecutor(num_blocks=700, max_model_len=20_000, before_step=take_a_millisecond)
    async with run_engine(executor, max_num_seqs=1) as engine:
        _, running = engine.client.submit([1, 2], proto_sampling(11_000), timeout_ms=200)
        _, waiting = engine.client.submit([1, 2], proto_sampling(11_000), timeout_ms=100)
        await asyncio.gather(running.ended.wait(), waiting.ended.wait())
        assert running.finish.reason == common_pb2.FINISH_REASON_TIMEOUT
        assert len(running.token_ids) < 11_000
        assert waiting.finish.reason == common_pb2.FINISH_REASON_TIMEOUT
        assert not any(output.prefill_started for output in waiting.outputs)
        load = await wait_until_idle(engine.client, seconds=1.0)
        assert load.num_free_blocks == 700


async def test_a_step_that_hangs_ends_the_engine_and_its_sequences() -> None:
    released = threading.Event()
    executor = FakeExecutor(before_step=lambda plan: released.wait(60) and None)
    try:
        async with run_engine(executor, step_timeout_seconds=0.3) as engine:
            answers = [engine.client.submit(prompt_of(5), proto_sampling(5))[1] for _ in range(3)]
            await asyncio.gather(*(answer.ended.wait() for answer in answers))
            assert {answer.finish.error.code for answer in answers} == {"engine_lost"}
            assert engine.stop.is_set()
            assert engine.service.hangs
            assert "has not ended for 0.3 s" in str(engine.service.failure)
            # For the test's own thread pool, which cannot leave a thread behind.
            released.set()
    finally:
        released.set()
