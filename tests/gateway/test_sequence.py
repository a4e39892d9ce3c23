"""A sequence over losses: what its client gets is what an unbroken run would have given."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2
from protos.wire.errors import InternalError, Overloaded, TokenlineError, Unavailable
from tests.fakes.detok_line import Answer, new_submit, run_in_process, token_bytes
from tests.fakes.engine_script import Script, one_per_step
from tests.fakes.fleet import fleet
from tests.fakes.tiny_tokenizers import byte_level
from tests.fakes.waiting import until

LOST = Unavailable("Lost.", code="engine_lost")
# "Grüße, 🦜 und STOP nie" as BL has it: ids of bytes.
TEXT_IDS = byte_level().encode("Grüße, 🦜 und STOP nie").ids
STOPPING = {"stop": ["STOP"], "prompt": [64], "top_logprobs": 2, "top_prompt_logprobs": 1}
CANCELLED = common_pb2.FINISH_REASON_CANCELLED
TIMEOUT = common_pb2.FINISH_REASON_TIMEOUT
ERROR = common_pb2.FINISH_REASON_ERROR

ScriptOf = Callable[[engine_pb2.Submit], Script]


def unbroken(**fields: Any) -> Answer:
    script = one_per_step(TEXT_IDS, num_cached_tokens=3)
    return run_in_process(new_submit(**fields), script, token_bytes(byte_level()))


def silent_at(num_tokens: int, ids: list[int] = TEXT_IDS) -> ScriptOf:
    """The first attempt falls silent after so many tokens; later ones go on to the end."""
    attempts = itertools.count()

    def script(submit: engine_pb2.Submit) -> Script:
        if next(attempts):
            return one_per_step(ids, num_cached_tokens=99)
        return one_per_step(ids[:num_tokens], ending=None, num_cached_tokens=3)

    return script


def failing(*errors: TokenlineError, after: int = 0) -> ScriptOf:
    """Each attempt but the last fails with one of `errors`, the first after some tokens."""
    left = list(errors)

    def script(submit: engine_pb2.Submit) -> Script:
        if left:
            return one_per_step(TEXT_IDS, error_after=after, error=left.pop(0))
        return one_per_step(TEXT_IDS)

    return script


def assert_equal(answer: Answer, expected: Answer) -> None:
    assert answer.summary == expected.summary
    assert answer.prompt_logprobs == expected.prompt_logprobs
    started = [output for output in answer.outputs if output.prefill_started]
    assert [output.num_cached_tokens for output in started] == [3]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    breaks=st.lists(st.integers(0, len(TEXT_IDS)), max_size=3).map(sorted),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_engines_lost_at_any_token_change_nothing(breaks: list[int], sizes: list[int]) -> None:
    """However the engine groups its tokens."""
    steps = list(grouped(TEXT_IDS, itertools.cycle(sizes)))
    left = [*breaks]

    def script(submit: engine_pb2.Submit) -> Script:
        num_done = len(submit.record.output_token_ids)
        error_after = max(left.pop(0), num_done) if left else None
        cached = 3 if not num_done else 99
        return Script(steps, error_after=error_after, error=LOST, num_cached_tokens=cached)

    async def run() -> Answer:
        async with fleet(script, num_engines=2) as line:
            return await line.generate(new_submit(**STOPPING))

    answer = asyncio.run(run())
    assert_equal(answer, unbroken(**STOPPING))


def grouped(ids: list[int], sizes: "itertools.cycle[int]") -> list[list[int]]:
    steps, rest = [], ids
    while rest:
        size = next(sizes)
        steps.append(rest[:size])
        rest = rest[size:]
    return steps


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 9, 11, 19])
async def test_a_detokenizer_cut_at_a_token_changes_nothing(num_tokens: int) -> None:
    async with fleet(silent_at(num_tokens)) as line:
        _, received = line.begin(new_submit(**STOPPING))
        # One step a token, the first of which also says that the sequence has begun.
        await until(lambda: line.engines[0].service.num_steps == max(1, num_tokens))
        line.detoks[0].service.cut()
        assert_equal(await received.answer(), unbroken(**STOPPING))
        assert "tokenline_sequence_resubmissions_total" in line.metrics.render().decode()


async def test_an_engine_that_restarts_goes_on_with_what_it_lost() -> None:
    async with fleet(silent_at(5)) as line:
        sequence, received = line.begin(new_submit(**STOPPING))
        await until(lambda: received.num_tokens > 0)
        await line.engines[0].stop()
        await until(lambda: not line.lanes.ready)
        await line.engines[0].start()
        assert_equal(await received.answer(), unbroken(**STOPPING))
        assert sequence.num_losses == 1
        assert 'resubmissions_total{reason="engine_lost"}' in line.metrics.render().decode()


async def test_choices_of_a_prompt_that_are_lost_together_stay_together_elsewhere() -> None:
    async with fleet(lambda submit: Script(ending=None), num_engines=3) as line:
        submits = [new_submit(prompt=[1, 2, 3]) for _ in range(4)]
        router = line.router(submits[0])
        begun = [line.begin(submit, router=router) for submit in submits]
        await until(lambda: sum(len(engine.service.live) for engine in line.engines) == 4)
        (used,) = [engine for engine in line.engines if engine.service.live]
        await used.stop()
        others = [engine for engine in line.engines if engine is not used]
        await until(lambda: sorted(len(engine.service.live) for engine in others) == [0, 4])
        for sequence, _ in begun:
            sequence.abort()
        answers = [await received.answer() for _, received in begun]
        assert {answer.finish.reason for answer in answers} == {CANCELLED}


async def test_a_detokenizer_that_is_lost_leaves_its_engine_to_go_on() -> None:
    async with fleet(silent_at(3), num_detoks=2, num_engines=2) as line:
        sequence, received = line.begin(new_submit(**STOPPING))
        engine, detok = sequence.engine_address, sequence.detok_address
        await until(lambda: received.num_tokens > 0)
        (used,) = [replica for replica in line.detoks if replica.address == detok]
        await used.stop()
        assert_equal(await received.answer(), unbroken(**STOPPING))
        assert sequence.engine_address == engine
        assert sequence.detok_address != detok


async def test_a_request_that_ends_engines_is_given_up_after_five_of_them() -> None:
    script = one_per_step(TEXT_IDS, error_after=2, error=LOST)
    async with fleet(script, num_engines=2) as line:
        sequence, received = line.begin(new_submit())
        finish = (await received.answer()).finish
        assert finish.reason == ERROR
        assert finish.error.kind == common_pb2.ERROR_KIND_UNAVAILABLE
        assert finish.error.code == "engine_lost" and "change the request" in finish.error.message
        assert sequence.num_losses == 5
        assert sum(len(engine.service.submitted) for engine in line.engines) == 5


async def test_a_request_that_ends_engines_at_each_token_is_given_up_after_twenty() -> None:
    def script(submit: engine_pb2.Submit) -> Script:
        num_done = len(submit.record.output_token_ids)
        return one_per_step(itertools.repeat(64, 100), error_after=num_done + 1, error=LOST)

    async with fleet(script, num_engines=2) as line:
        sequence, received = line.begin(new_submit())
        assert (await received.answer()).finish.reason == ERROR
        assert sequence.num_losses == 20


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("Draining.", code="engine_draining"),
        Unavailable("Away.", code="engine_unreachable"),
        Overloaded("Full.", code="queue_full"),
    ],
)
async def test_what_was_taken_is_not_lost_to_drains_and_full_queues(
    error: TokenlineError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.recovery._LAST_BACKOFF_SECONDS", 0.05)
    async with fleet(failing(LOST, *[error] * 8, after=2)) as line:
        sequence, received = line.begin(new_submit())
        assert (await received.answer()).summary == unbroken().summary
        assert sequence.num_losses == 1


async def test_a_full_queue_refuses_what_is_new() -> None:
    async with fleet(failing(Overloaded("Full.", code="queue_full"))) as line:
        assert (await line.generate(new_submit())).finish.error.code == "queue_full"


@pytest.mark.parametrize("code", ["resume_diverged", "engine_fault"])
async def test_other_errors_are_the_clients(code: str, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(failing(LOST, InternalError("Wrong.", code=code), after=2)) as line:
        answer = await line.generate(new_submit(request_id="diverges"))
        assert answer.finish.error.code == code
        loud = [each for each in caplog.records if each.levelno == logging.CRITICAL]
        assert ["diverges" in each.getMessage() for each in loud] == (
            [True] if code == "resume_diverged" else []
        )


async def test_an_abort_while_no_replica_is_there_is_answered_at_once() -> None:
    async with fleet(silent_at(2)) as line:
        sequence, received = line.begin(new_submit())
        await until(lambda: received.num_tokens == 2)
        await line.engines[0].stop()
        await until(lambda: not line.lanes.ready and sequence.num_losses == 1)
        sequence.abort()
        assert received.ended.is_set()
        assert received.outputs[-1].finish.reason == CANCELLED
        sequence.abort()
        await line.engines[0].start()
        await line.until_all_ready()
        assert len(line.engines[0].service.submitted) == 1


async def test_an_abort_that_meets_a_loss_is_a_cancel() -> None:
    async with fleet(silent_at(2)) as line:
        sequence, received = line.begin(new_submit())
        await until(lambda: received.num_tokens == 2)
        line.detoks[0].service.cut()
        sequence.abort()
        assert (await received.answer()).finish.reason == CANCELLED


async def test_a_deadline_that_passes_while_no_replica_is_there_is_a_timeout() -> None:
    async with fleet(silent_at(2)) as line:
        now = asyncio.get_running_loop().time
        deadline = now() + 2.0
        _, received = line.begin(new_submit(), deadline=deadline)
        await until(lambda: received.num_tokens == 2)
        (submit,) = line.engines[0].service.submitted
        assert 0 < submit.record.timeout_ms <= 2000
        await line.engines[0].stop()
        answer = await received.answer()
        assert answer.finish.reason == TIMEOUT
        assert now() >= deadline


async def test_an_attempt_is_told_the_time_that_is_left() -> None:
    async with fleet(silent_at(2)) as line:
        deadline = asyncio.get_running_loop().time() + 1000
        _, received = line.begin(new_submit(), deadline=deadline)
        await until(lambda: received.num_tokens == 2)
        await line.engines[0].stop()
        await until(lambda: not line.lanes.ready)
        await line.engines[0].start()
        await received.answer()
        first, second = line.engines[0].service.submitted
        assert second.record.timeout_ms < first.record.timeout_ms <= 1_000_000


async def test_a_sequence_waits_for_a_replica_only_so_long() -> None:
    async with fleet(silent_at(2), recovery_seconds=0.3) as line:
        _, received = line.begin(new_submit())
        await until(lambda: received.num_tokens == 2)
        await line.engines[0].stop()
        finish = (await received.answer()).finish
        assert finish.reason == ERROR
        assert finish.error.kind == common_pb2.ERROR_KIND_UNAVAILABLE
        assert "within 0.3 seconds" in finish.error.message
        # And what comes then is refused at once.
        await until(lambda: not line.lanes.recovering)
        with pytest.raises(Unavailable, match="not ready"):
            line.begin(new_submit())


async def test_a_new_sequence_waits_for_a_line_that_restarts() -> None:
    async with fleet(one_per_step(TEXT_IDS)) as line:
        await line.engines[0].stop()
        await until(lambda: not line.lanes.ready)
        assert line.lanes.recovering
        assert line.lanes.model().name == "tiny"
        _, received = line.begin(new_submit())
        assert not received.outputs
        await line.engines[0].start()
        assert (await received.answer()).summary == unbroken().summary


async def test_a_record_with_outputs_goes_on_after_them() -> None:
    """As a gateway does that takes over from another."""
    async with fleet(silent_at(7)) as line:
        _, first = line.begin(new_submit())
        await until(lambda: first.num_tokens >= 4)
        listed = [token_id for output in first.outputs for token_id in output.token_ids]
        text = "".join(output.text for output in first.outputs)
        rest = await line.generate(new_submit(output=listed))
        assert listed + rest.token_ids == unbroken().token_ids
        assert text + rest.text == unbroken().text
        assert not any(output.prefill_started for output in rest.outputs)


async def test_late_outputs_of_a_replaced_attempt_are_dropped() -> None:
    async with fleet(silent_at(2)) as line:
        sequence, received = line.begin(new_submit())
        await until(lambda: received.num_tokens == 2)
        line.detoks[0].service.cut()
        await until(lambda: sequence.num_losses == 1)
        sequence._take(1, detok_pb2.Output(text="late", token_ids=[1]))
        assert (await received.answer()).summary == unbroken().summary
