"""A stub engine: answers each Submit with a fixed script of token ids, as a real engine would."""

import argparse
import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.wire.logs import configure_logging
from protos.wire.multiplex_server import Outbox, serve_stream
from protos.wire.server import GrpcServer
from protos.wire.service import install_stop_signals
from protos.wire.stream_adapter import engine_adapter
from tests.fakes.engine_script import Script, ScriptedSequence, one_per_step

logger = logging.getLogger(__name__)

EngineOutbox = Outbox[engine_pb2.Submit, engine_pb2.Output]
SERVICE = "protos.engine.v1.EngineService"


class _Stream:
    """The sequences of one call, stepped together: one message a step, none ahead of the reader."""

    def __init__(self, engine: "ScriptedEngine") -> None:
        self._engine = engine
        self._sequences: dict[int, ScriptedSequence] = {}
        self._outbox: EngineOutbox | None = None
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    def submit(self, submit: engine_pb2.Submit, outbox: EngineOutbox) -> None:
        copy = engine_pb2.Submit.FromString(submit.SerializeToString())
        sequence = ScriptedSequence(copy, self._engine.start(copy))
        sequence.due = asyncio.get_running_loop().time() + sequence.script.delay_seconds
        self._sequences[submit.sequence_id] = sequence
        self._outbox = outbox
        self._changed.set()

    def abort(self, sequence_id: int, outbox: EngineOutbox) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        self._engine.end(sequence, aborted=True)
        finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_CANCELLED)
        outbox.emit(engine_pb2.Output(sequence_id=sequence_id, finish=finish))

    def take_load(self) -> common_pb2.EngineLoad:
        """Called as a response is built, so it also says that the last step was taken."""
        self._taken.set()
        return self._engine.load()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._step(loop.time()):
                await self._taken.wait()
                continue
            waits = [
                sequence.due - loop.time()
                for sequence in self._sequences.values()
                if self._engine.may_run(sequence)
            ]
            self._changed.clear()
            timeout = max(0.0, min(waits)) if waits and min(waits) < float("inf") else None
            try:
                await asyncio.wait_for(self._changed.wait(), timeout)
            except TimeoutError:
                continue

    def _step(self, now: float) -> bool:
        emitted = False
        self._taken.clear()
        for sequence_id, sequence in list(self._sequences.items()):
            if sequence.due > now or not self._engine.may_run(sequence):
                continue
            output = sequence.next_output()
            if output is None:
                sequence.due = float("inf")
                continue
            sequence.due = self._engine.next_step(now, sequence.script.delay_seconds)
            if sequence.finished:
                del self._sequences[sequence_id]
                self._engine.end(sequence, aborted=False)
            assert self._outbox is not None
            self._outbox.emit(output)
            emitted = True
        self._engine.num_steps += emitted
        return emitted


class ScriptedEngine(engine_pb2_grpc.EngineServiceServicer):
    """EngineService over scripts. `script` is one for all, or chosen by a callable of the Submit.

    `submitted` and `aborted` record every Submit, and those that were aborted while live.
    queues: at most `max_num_seqs` run, in steps that all of them take together; others wait.
    """

    def __init__(
        self,
        script: Script | Callable[[engine_pb2.Submit], Script],
        *,
        model: common_pb2.ModelIdentity | None = None,
        vocab_size: int = 258,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        queues: bool = False,
    ) -> None:
        self._script_of = script if callable(script) else lambda submit: script
        self._status = engine_pb2.GetStatusResponse(
            model=model or common_pb2.ModelIdentity(name="scripted", fingerprint="scripted"),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            block_size=16,
        )
        self.submitted: list[engine_pb2.Submit] = []
        self.aborted: list[engine_pb2.Submit] = []
        self.live: set[int] = set()
        self._queues = queues
        # Of those that are live, with `queues`.
        self._running: set[int] = set()
        self.num_steps = 0

    def start(self, submit: engine_pb2.Submit) -> Script:
        self.submitted.append(submit)
        script = self._script_of(submit)
        self.live.add(id(submit))
        return script

    def end(self, sequence: ScriptedSequence, *, aborted: bool) -> None:
        self.live.discard(id(sequence.submit))
        self._running.discard(id(sequence.submit))
        if aborted:
            self.aborted.append(sequence.submit)

    def may_run(self, sequence: ScriptedSequence) -> bool:
        """Whether the sequence runs, or can begin to; then it does."""
        if self._queues and len(self._running) < self._status.max_num_seqs:
            self._running.add(id(sequence.submit))
        return not self._queues or id(sequence.submit) in self._running

    def next_step(self, now: float, seconds: float) -> float:
        """When a sequence that was stepped now is stepped again; a step takes so many seconds."""
        return (now // seconds + 1) * seconds if self._queues and seconds else now + seconds

    def load(self) -> common_pb2.EngineLoad:
        num_running = len(self._running if self._queues else self.live)
        return common_pb2.EngineLoad(
            num_running=num_running,
            num_waiting=len(self.live) - num_running,
            num_free_blocks=1000,
            num_blocks=1000,
            num_steps=self.num_steps,
        )

    async def Generate(self, request_iterator: Any, context: Any) -> None:
        stream = _Stream(self)
        runner = asyncio.create_task(stream.run())
        runner.add_done_callback(_log_failure)
        try:
            await serve_stream(request_iterator, context, stream, engine_adapter(stream.take_load))
        finally:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)

    async def GetStatus(self, request: Any, context: Any) -> engine_pb2.GetStatusResponse:
        status = engine_pb2.GetStatusResponse()
        status.CopyFrom(self._status)
        status.load.CopyFrom(self.load())
        return status

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serves on loopback and yields host:port; leaving the block cuts all its streams."""
        async with GrpcServer("engine_svc", "127.0.0.1", port) as server:
            engine_pb2_grpc.add_EngineServiceServicer_to_server(self, server.grpc)
            await server.start([SERVICE])
            yield server.address


def _log_failure(runner: asyncio.Task[None]) -> None:
    if not runner.cancelled() and (error := runner.exception()):
        logger.error("the script failed, so its sequences hang", exc_info=error)


def counted_script(
    submit: engine_pb2.Submit, num_tokens: int, vocab_size: int, step_seconds: float
) -> Script:
    """`num_tokens` ids that depend on the prompt alone, none of which ends the sequence."""
    sampling = submit.record.sampling
    ends = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    first = sum(submit.record.prompt_token_ids)
    walk = ((first + 7919 * index) % vocab_size for index in itertools.count())
    ids = itertools.islice((token_id for token_id in walk if token_id not in ends), num_tokens)
    return one_per_step(list(ids), delay_seconds=step_seconds)


async def _serve(arguments: argparse.Namespace) -> None:
    engine = ScriptedEngine(
        lambda submit: counted_script(
            submit, arguments.tokens_per_request, arguments.vocab_size, arguments.step_seconds
        ),
        model=common_pb2.ModelIdentity(
            name=arguments.model_name, fingerprint=arguments.model_fingerprint
        ),
        vocab_size=arguments.vocab_size,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        queues=arguments.step_seconds > 0,
    )
    async with GrpcServer("engine_svc", arguments.host, arguments.port) as server:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server.grpc)
        await server.serve_until_stopped(install_stop_signals(), services=[SERVICE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens-per-request", type=int, default=128)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="0: as they are read")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--model-name", default="scripted")
    parser.add_argument("--model-fingerprint", default="scripted")
    configure_logging("scripted_engine")
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
