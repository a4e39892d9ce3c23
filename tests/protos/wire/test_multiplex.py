"""One stream carries many sequences; every submit ends in exactly one finish."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.wire import multiplex_client
from protos.wire.channel import open_channel
from protos.wire.errors import InvalidRequest
from protos.wire.multiplex_client import StreamClient
from protos.wire.multiplex_server import Outbox, serve_stream
from protos.wire.server import GrpcServer
from protos.wire.stream_adapter import detok_adapter, engine_adapter

Client = StreamClient[engine_pb2.Submit, engine_pb2.Output]
EngineOutbox = Outbox[engine_pb2.Submit, engine_pb2.Output]
STOP = common_pb2.Finish(reason=common_pb2.FINISH_REASON_STOP)
CANCELLED = common_pb2.Finish(reason=common_pb2.FINISH_REASON_CANCELLED)


class Mutable:
    """A call's context whose writes wait while its server is mute."""

    def __init__(self, context: Any, may_write: asyncio.Event) -> None:
        self._context = context
        self._may_write = may_write

    async def write(self, response: engine_pb2.GenerateResponse) -> None:
        await self._may_write.wait()
        await self._context.write(response)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Counting(engine_pb2_grpc.EngineServiceServicer):
    """Emits 0, 1, 2 … max_tokens - 1, one token per turn of the loop; can be held, or muted."""

    def __init__(self) -> None:
        self.tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.outboxes: list[EngineOutbox] = []
        self.note: Callable[[engine_pb2.Submit], None] = lambda submit: None
        self.streams: list[asyncio.Task[None]] = []
        self.adapter = engine_adapter()

    async def Generate(self, request_iterator: Any, context: Any) -> None:
        serving = asyncio.create_task(
            serve_stream(request_iterator, Mutable(context, self.may_write), self, self.adapter)
        )
        self.streams.append(serving)
        with suppress(asyncio.CancelledError):
            await serving

    def cut(self) -> None:
        """Ends the newest stream from this side."""
        if self.streams:
            self.streams[-1].cancel()

    def submit(self, submit: engine_pb2.Submit, outbox: EngineOutbox) -> None:
        self.note(submit)
        if submit.request_id == "refuse":
            raise InvalidRequest("Refused.", param="prompt")
        if submit.request_id == "raise":
            raise ValueError("a fault")
        if outbox not in self.outboxes:
            self.outboxes.append(outbox)
        key = (id(outbox), submit.sequence_id)
        self.tasks[key] = asyncio.create_task(self._count(submit, outbox))

    def abort(self, sequence_id: int, outbox: EngineOutbox) -> None:
        task = self.tasks.pop((id(outbox), sequence_id), None)
        if task is not None:
            task.cancel()
            outbox.emit(engine_pb2.Output(sequence_id=sequence_id, finish=CANCELLED))

    async def _count(self, submit: engine_pb2.Submit, outbox: EngineOutbox) -> None:
        count = submit.record.sampling.max_tokens
        for token in range(count):
            await self.may_run.wait()
            await asyncio.sleep(0)
            outbox.emit(
                engine_pb2.Output(
                    sequence_id=submit.sequence_id,
                    token_ids=[token],
                    finish=STOP if token == count - 1 else None,
                )
            )
        self.tasks.pop((id(outbox), submit.sequence_id), None)


@asynccontextmanager
async def line(servicer: Counting) -> AsyncIterator[tuple[GrpcServer, Client]]:
    async with GrpcServer("engine_svc", "127.0.0.1", 0) as server:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server.grpc)
        await server.start(["protos.engine.v1.EngineService"])
        async with open_channel(server.address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            async with Client(stub.Generate, engine_adapter(), lost_code="engine_lost") as client:
                yield server, client


def submit(max_tokens: int, request_id: str = "r") -> engine_pb2.Submit:
    sampling = common_pb2.SamplingParameters(max_tokens=max_tokens)
    return engine_pb2.Submit(
        request_id=request_id, record=common_pb2.GenerationRecord(sampling=sampling)
    )


async def collect(client: Client, max_tokens: int) -> tuple[list[int], list[common_pb2.Finish]]:
    tokens: list[int] = []
    finishes = []
    async with client.open(submit(max_tokens)) as outputs:
        async for output in outputs:
            tokens.extend(output.token_ids)
            if output.HasField("finish"):
                finishes.append(output.finish)
    return tokens, finishes


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_many_sequences_share_one_stream_and_keep_their_own_order() -> None:
    servicer = Counting()
    async with line(servicer) as (_, client):
        results = await asyncio.gather(*(collect(client, n) for n in range(1, 60)))
    assert [tokens for tokens, _ in results] == [list(range(n)) for n in range(1, 60)]
    assert all(finishes == [STOP] for _, finishes in results)
    assert len(servicer.outboxes) == 1


async def test_a_slow_reader_gets_merged_outputs() -> None:
    async with line(Counting()) as (_, client), client.open(submit(500)) as outputs:
        await until(lambda: client.num_live == 0)
        received = [output async for output in outputs]
    assert len(received) == 1
    assert list(received[0].token_ids) == list(range(500))
    assert received[0].finish == STOP


async def test_leaving_early_aborts_on_the_server() -> None:
    servicer = Counting()
    async with line(servicer) as (_, client):
        async with client.open(submit(10**9)) as outputs:
            await anext(outputs)
        await until(lambda: not servicer.tasks and client.num_live == 0)


async def test_abort_before_the_connection_exists_ends_in_cancelled() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        async with Client(stub.Generate, engine_adapter(), lost_code="engine_lost") as client:
            received: list[engine_pb2.Output] = []
            sequence_id = client.submit(submit(1), received.append)
            client.abort(sequence_id)
            client.abort(sequence_id)
    assert [output.finish for output in received] == [CANCELLED]


async def test_refusals_and_faults_end_their_sequence_only() -> None:
    async with line(Counting()) as (_, client):
        refused: list[engine_pb2.Output] = []
        faulty: list[engine_pb2.Output] = []
        client.submit(submit(1, "refuse"), refused.append)
        client.submit(submit(1, "raise"), faulty.append)
        assert await collect(client, 3) == ([0, 1, 2], [STOP])
    assert [output.finish.error.param for output in refused] == ["prompt"]
    assert [output.finish.error.kind for output in faulty] == [common_pb2.ERROR_KIND_INTERNAL]


async def test_a_broken_protocol_ends_the_stream_with_its_reason_also_amid_writes() -> None:
    servicer = Counting()
    async with line(servicer) as (server, _), open_channel(server.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        for _ in range(30):
            call = stub.Generate()
            for _ in range(2):
                command = submit(10**9)
                command.sequence_id = 1
                await call.write(engine_pb2.GenerateRequest(submit=command))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                async with asyncio.timeout(10):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "sequence_id 1 is already live" in str(ended.value.details())
        await until(lambda: not servicer.tasks)


async def test_a_lost_server_ends_sequences_and_a_new_one_is_used() -> None:
    servicer = Counting()
    async with line(servicer) as (server, client):
        port = int(server.address.rpartition(":")[2])
        async with client.open(submit(10**9)) as outputs:
            await anext(outputs)
            await server.grpc.stop(0)
            last = [output async for output in outputs][-1]
        assert last.finish.error.kind == common_pb2.ERROR_KIND_UNAVAILABLE
        assert last.finish.error.code == "engine_lost"
        await until(lambda: not servicer.tasks)
        async with GrpcServer("engine_svc", "127.0.0.1", port) as second:
            engine_pb2_grpc.add_EngineServiceServicer_to_server(Counting(), second.grpc)
            await second.start(["protos.engine.v1.EngineService"])
            assert await collect(client, 3) == ([0, 1, 2], [STOP])


async def test_a_server_that_never_comes_ends_sequences_in_time() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        async with (
            Client(
                stub.Generate,
                engine_adapter(),
                lost_code="engine_lost",
                silence_seconds=0.2,
            ) as client,
            asyncio.timeout(10),
        ):
            tokens, finishes = await collect(client, 3)
    assert tokens == []
    assert [finish.error.code for finish in finishes] == ["engine_unreachable"]


async def test_time_spent_waiting_for_the_connection_is_taken_off_what_a_sequence_may_take() -> (
    None
):
    servicer = Counting()
    taken: list[int] = []
    servicer.note = lambda submit: taken.append(submit.record.timeout_ms)
    async with GrpcServer("engine_svc", "127.0.0.1", 0) as server:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server.grpc)
        async with open_channel(server.address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            async with Client(
                stub.Generate, engine_adapter(), lost_code="engine_lost", silence_seconds=60
            ) as client:
                limits = (0, 10, 60_000)
                for timeout_ms in limits:
                    command = submit(1)
                    command.record.timeout_ms = timeout_ms
                    client.submit(command, lambda output: None)
                await asyncio.sleep(0.05)
                await server.start(["protos.engine.v1.EngineService"])
                await until(lambda: client.num_live == 0)
    assert taken[:2] == [0, 1]
    assert 0 < taken[2] <= 60_000 - 50


async def test_closing_the_client_ends_what_is_open() -> None:
    servicer = Counting()
    servicer.may_run.clear()
    received: list[engine_pb2.Output] = []
    async with line(servicer) as (_, client):
        client.submit(submit(5), received.append)
        await until(lambda: bool(servicer.tasks))
    assert [output.finish.error.code for output in received] == ["engine_lost"]


def test_merging_outputs_of_detok_joins_text_and_lists() -> None:
    pending = detok_pb2.Output(text="ab", token_ids=[1], prefill_started=True)
    detok_adapter().merge(pending, detok_pb2.Output(text="c", token_ids=[2, 3], finish=STOP))
    assert pending == detok_pb2.Output(
        text="abc", token_ids=[1, 2, 3], prefill_started=True, finish=STOP
    )


async def test_an_outbox_splits_what_would_make_a_huge_message() -> None:
    outbox: Outbox[detok_pb2.Submit, detok_pb2.Output] = Outbox(detok_adapter())
    written: list[detok_pb2.GenerateResponse] = []

    class Context:
        async def write(self, response: detok_pb2.GenerateResponse) -> None:
            written.append(response)

    for sequence_id in range(1, 6):
        outbox.begin(sequence_id)
        outbox.emit(detok_pb2.Output(sequence_id=sequence_id, text="x" * (5 << 20)))
    writer = asyncio.create_task(outbox.write_to(Context()))
    await until(lambda: sum(len(response.outputs) for response in written) == 5)
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    assert len(written) == 5


Event = tuple[str, int]
events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("turns"), st.integers(0, 40)),
        st.tuples(st.just("cut"), st.just(0)),
        st.tuples(st.sampled_from(["mute", "unmute"]), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(events)
def test_every_submit_ends_in_exactly_one_finish_under_random_aborts_closes_and_silence(
    script: list[Event],
) -> None:
    # These times are there for real servers; here they would only make the test slow.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiplex_client, "_LAST_BACKOFF_SECONDS", 0.01)
        patch.setattr(multiplex_client, "_FIRST_BACKOFF_SECONDS", 0.01)
        patch.setattr(multiplex_client, "_CHECK_SECONDS", 0.02)
        asyncio.run(_run_script(script))


async def _run_script(script: list[Event]) -> None:
    servicer = Counting()
    finishes: list[list[common_pb2.FinishReason.ValueType]] = []
    wanted: list[int] = []
    tokens: list[list[int]] = []
    async with GrpcServer("engine_svc", "127.0.0.1", 0) as server:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server.grpc)
        await server.start(["protos.engine.v1.EngineService"])
        async with open_channel(server.address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)

            async with Client(
                stub.Generate, engine_adapter(), lost_code="engine_lost", silence_seconds=0.1
            ) as client:
                for action, number in script:
                    if action == "submit":
                        index = len(wanted)
                        wanted.append(number)
                        finishes.append([])
                        tokens.append([])

                        def sink(output: engine_pb2.Output, index: int = index) -> None:
                            tokens[index].extend(output.token_ids)
                            if output.HasField("finish"):
                                finishes[index].append(output.finish.reason)

                        client.submit(submit(number), sink)
                    elif action == "abort":
                        client.abort(number)
                    elif action == "cut":
                        servicer.cut()
                    elif action == "mute":
                        servicer.may_write.clear()
                    elif action == "unmute":
                        servicer.may_write.set()
                    for _ in range(number if action == "turns" else 1):
                        await asyncio.sleep(0)
                # Also while the server is mute.
                await until(lambda: client.num_live == 0)
                await until(lambda: not servicer.tasks)

    for index, reasons in enumerate(finishes):
        assert len(reasons) == 1
        assert tokens[index] == list(range(len(tokens[index])))
        if reasons[0] == common_pb2.FINISH_REASON_STOP:
            assert len(tokens[index]) == wanted[index]
