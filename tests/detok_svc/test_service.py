"""The service between a gateway's stream and the engines' streams, over real sockets."""

import asyncio
import random
from collections.abc import Callable

import pytest

from detok_svc.text_stream import TextStream
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2, detok_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.errors import Unavailable
from protos.wire.multiplex_client import StreamClient
from protos.wire.stream_adapter import detok_adapter
from tests.fakes.detok_line import MODEL, Answer, DetokLine, detok_line, new_submit, token_bytes
from tests.fakes.engine_script import Script, one_per_step
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_tokenizers import byte_level
from tests.fakes.waiting import until

BL = token_bytes(byte_level())
CANCELLED, ERROR = common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_ERROR
Client = StreamClient[detok_pb2.Submit, detok_pb2.Output]


def ids(text: str) -> list[int]:
    return byte_level().encode(text).ids


def silent_after(text: str) -> Script:
    return one_per_step(ids(text), ending=None)


def begin(line: DetokLine, submit: detok_pb2.Submit) -> tuple[int, list[detok_pb2.Output]]:
    """Submits; returns the sequence's id and the list that its outputs go to."""
    submit.engine_address = line.engine_address
    outputs: list[detok_pb2.Output] = []
    return line.client.submit(submit, outputs.append), outputs


def is_finished(outputs: list[detok_pb2.Output]) -> bool:
    return bool(outputs) and outputs[-1].HasField("finish")


async def test_an_abort_flushes_what_is_held_and_reaches_the_engine() -> None:
    engine = ScriptedEngine(silent_after("abc"))
    async with detok_line(BL, engine) as line:
        sequence_id, outputs = begin(line, new_submit(stop=["cd"], request_id="r"))
        await until(lambda: Answer(outputs).token_ids == ids("abc"))
        assert Answer(outputs).text == "ab"
        line.client.abort(sequence_id)
        await until(lambda: is_finished(outputs) and bool(engine.aborted))
        assert Answer(outputs).text == "abc"
        assert Answer(outputs).finish == common_pb2.Finish(reason=CANCELLED)
        assert line.service.num_live == 0
    assert [submit.request_id for submit in engine.aborted] == ["r"]


async def test_a_gateway_that_goes_away_aborts_its_sequences_and_no_others() -> None:
    engine = ScriptedEngine(silent_after("ab"))
    async with detok_line(BL, engine) as line:
        _, kept = begin(line, new_submit(request_id="kept"))
        async with open_channel(line.address) as channel:
            stub = detok_pb2_grpc.DetokServiceStub(channel)
            async with Client(stub.Generate, detok_adapter(), lost_code="detok_lost") as other:
                for _ in range(5):
                    submit = new_submit(engine_address=line.engine_address, request_id="gone")
                    other.submit(submit, lambda output: None)
                await until(lambda: len(engine.live) == 6)
        await until(lambda: len(engine.aborted) == 5)
        assert {submit.request_id for submit in engine.aborted} == {"gone"}
        assert line.service.num_live == 1 and not is_finished(kept)


async def test_a_lost_engine_is_an_error_and_the_next_one_at_its_address_is_used() -> None:
    engine = ScriptedEngine(silent_after("ab"))
    lost = ScriptedEngine(silent_after("ab"))
    async with detok_line(BL, engine) as line:
        async with lost.serving() as address:
            submit = new_submit(engine_address=address, stop=["bc"])
            outputs: list[detok_pb2.Output] = []
            line.client.submit(submit, outputs.append)
            await until(lambda: Answer(outputs).token_ids == ids("ab"))
        await until(lambda: is_finished(outputs))
        finish = Answer(outputs).finish
        assert (finish.reason, finish.error.kind) == (ERROR, common_pb2.ERROR_KIND_UNAVAILABLE)
        assert finish.error.code == "engine_lost"
        # What may yet be a stop string is left for the continuation.
        assert Answer(outputs).text == "a"
        assert line.service.num_live == 0
        again = ScriptedEngine(one_per_step(ids("abd")))
        async with again.serving(int(address.rpartition(":")[2])):
            submit = new_submit(engine_address=address, stop=["bc"], output=ids("ab"))
            assert (await line.generate(submit)).text == "bd"


@pytest.mark.parametrize("address", ["", "engine", "engine:0", "a:1,b:2"])
async def test_a_wrong_engine_address_is_refused(address: str) -> None:
    async with detok_line(BL, ScriptedEngine(Script())) as line:
        outputs: list[detok_pb2.Output] = []
        line.client.submit(new_submit(engine_address=address), outputs.append)
        await until(lambda: is_finished(outputs))
        error = Answer(outputs).finish.error
        assert error.kind == common_pb2.ERROR_KIND_INVALID_REQUEST
        assert error.param == "engine_address"
        assert not line.engines.addresses


async def test_an_empty_stop_string_is_refused_before_the_engine_hears_of_it() -> None:
    engine = ScriptedEngine(Script())
    async with detok_line(BL, engine) as line:
        answer = await line.generate(new_submit(stop=[""]))
        assert answer.finish.error.param == "stop"
        assert not engine.submitted and line.service.num_live == 0


async def test_an_engine_that_refuses_is_passed_on() -> None:
    error = Unavailable("Draining.", code="draining")
    engine = ScriptedEngine(Script(error_after=0, error=error))
    async with detok_line(BL, engine) as line:
        answer = await line.generate(new_submit())
    assert answer.finish.error == common_pb2.Error(
        kind=common_pb2.ERROR_KIND_UNAVAILABLE, code="draining", message="Draining."
    )


async def test_the_engine_gets_the_record_and_the_trace() -> None:
    engine = ScriptedEngine(one_per_step(ids("a")))
    async with detok_line(BL, engine) as line:
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        submit = new_submit(
            prompt=[1, 2], request_id="r", traceparent=f"00-{trace_id}-b7ad6b7169203331-01"
        )
        submit.record.cache_salt = "salt"
        await line.generate(submit)
    (received,) = engine.submitted
    assert received.request_id == "r" and trace_id in received.traceparent
    assert received.record == submit.record


async def test_a_fault_in_decoding_ends_that_sequence_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take = TextStream.take

    def failing(self: TextStream, output: object) -> object:
        if getattr(output, "num_cached_tokens", 0) == 13:
            raise ValueError("a fault")
        return take(self, output)  # type: ignore[arg-type]

    monkeypatch.setattr(TextStream, "take", failing)
    engine = ScriptedEngine(
        lambda submit: one_per_step(
            ids("abc"), num_cached_tokens=13 if submit.request_id == "bad" else 0, ending=None
        )
    )
    async with detok_line(BL, engine) as line:
        _, bad = begin(line, new_submit(request_id="bad"))
        _, good = begin(line, new_submit(request_id="good"))
        await until(lambda: is_finished(bad) and Answer(good).text == "abc")
        assert Answer(bad).finish.error.kind == common_pb2.ERROR_KIND_INTERNAL
        await until(lambda: len(engine.aborted) == 1)
        assert line.service.num_live == 1
    assert "a fault" in caplog.text


async def test_loads_of_all_engines_reach_every_gateway() -> None:
    engine, other_engine = ScriptedEngine(silent_after("a")), ScriptedEngine(silent_after("a"))
    reports: dict[str, dict[str, int]] = {"first": {}, "second": {}}

    def collector(gateway: str) -> Callable[[detok_pb2.GenerateResponse], None]:
        def collect(response: detok_pb2.GenerateResponse) -> None:
            for report in response.engine_loads:
                reports[gateway][report.engine_address] = report.load.num_running

        return collect

    async with (
        other_engine.serving() as other_address,
        detok_line(BL, engine, on_response=collector("first")) as line,
        open_channel(line.address) as channel,
    ):
        stub = detok_pb2_grpc.DetokServiceStub(channel)
        async with Client(
            stub.Generate,
            detok_adapter(),
            lost_code="detok_lost",
            on_response=collector("second"),
        ) as second:
            begin(line, new_submit())
            await until(lambda: reports["first"].get(line.engine_address) == 1)
            for _ in range(2):
                second.submit(new_submit(engine_address=other_address), lambda output: None)
            await until(lambda: reports["second"].get(other_address) == 2)
            await until(lambda: reports["first"].get(other_address) == 2)
            begin(line, new_submit())
            await until(lambda: reports["second"].get(line.engine_address) == 2)


async def test_a_link_without_work_is_closed_and_made_again_when_needed() -> None:
    ends = one_per_step(ids("ab"))
    engine = ScriptedEngine(lambda s: silent_after("a") if s.request_id == "hold" else ends)
    async with detok_line(BL, engine, engine_idle_seconds=60) as line:
        now = asyncio.get_running_loop().time()
        sequence_id, outputs = begin(line, new_submit(request_id="hold"))
        await until(lambda: Answer(outputs).text == "a")
        await line.engines.close_idle(now + 1000)
        assert line.engines.addresses == {line.engine_address}, "a live sequence keeps the link"
        line.client.abort(sequence_id)
        await until(lambda: not engine.live)
        await line.engines.close_idle(now + 1030)
        assert line.engines.addresses == {line.engine_address}
        await line.engines.close_idle(now + 1100)
        assert not line.engines.addresses
        assert (await line.generate(new_submit())).text == "ab"
        assert line.engines.addresses == {line.engine_address}


async def test_links_without_work_are_closed_in_the_background() -> None:
    async with detok_line(
        BL, ScriptedEngine(one_per_step(ids("a"))), engine_idle_seconds=0.02
    ) as line:
        await line.generate(new_submit())
        await until(lambda: not line.engines.addresses)


async def test_status_names_the_model() -> None:
    async with detok_line(BL, ScriptedEngine(Script())) as line:
        status = await line.stub.GetStatus(detok_pb2.GetStatusRequest())
        assert status.model == MODEL


async def test_drain_waits_for_the_live_sequences() -> None:
    async with detok_line(BL, ScriptedEngine(silent_after("a"))) as line:
        sequence_id, outputs = begin(line, new_submit())
        await until(lambda: Answer(outputs).text == "a")
        draining = asyncio.create_task(line.service.drain(60.0))
        await asyncio.sleep(0)
        assert not draining.done()
        refused = await line.generate(new_submit())
        assert refused.finish.error.kind == common_pb2.ERROR_KIND_UNAVAILABLE
        assert refused.finish.error.code == "detok_draining"
        assert len(line.engine.submitted) == 1
        line.client.abort(sequence_id)
        await asyncio.wait_for(draining, 10)


async def test_what_is_live_after_the_grace_time_ends_unflushed_to_go_on_elsewhere() -> None:
    async with detok_line(BL, ScriptedEngine(silent_after("ab"))) as line:
        _, outputs = begin(line, new_submit(stop=["bc"]))
        await until(lambda: Answer(outputs).token_ids == ids("ab"))
        await asyncio.wait_for(line.service.drain(0.0), 10)
        await until(lambda: is_finished(outputs))
        assert Answer(outputs).text == "a"
        assert Answer(outputs).finish.error.code == "detok_draining"
        assert line.service.num_live == 0
        await until(lambda: not line.engine.live)


async def test_aborts_at_random_moments_leave_nothing_behind() -> None:
    chooser = random.Random(7)
    engine = ScriptedEngine(
        lambda submit: chooser.choice(
            [one_per_step(ids("abcdef")), silent_after("abc"), Script([ids("abcd")], error_after=2)]
        )
    )
    async with detok_line(BL, engine) as line:
        sequences = []
        for index in range(300):
            stop = chooser.choice([[], ["cd"], ["ef!"]])
            sequences.append(begin(line, new_submit(stop=stop, request_id=str(index))))
            if chooser.random() < 0.5:
                await asyncio.sleep(0)
            if chooser.random() < 0.5:
                line.client.abort(chooser.choice(sequences)[0])
        for sequence_id, _ in sequences:
            line.client.abort(sequence_id)
        await until(lambda: all(is_finished(outputs) for _, outputs in sequences))
        await until(lambda: not engine.live)
        assert line.service.num_live == 0
        for _, outputs in sequences:
            assert sum(output.HasField("finish") for output in outputs) == 1
            assert "abcdef".startswith(Answer(outputs).text)
