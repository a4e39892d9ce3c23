"""A stub detokenizer service: answers each Submit with a fixed script of outputs, engine unseen."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2, detok_pb2_grpc
from protos.wire.errors import TokenlineError, to_proto
from protos.wire.multiplex_server import Outbox, serve_stream
from protos.wire.server import GrpcServer
from protos.wire.stream_adapter import detok_adapter
from tests.fakes.open_calls import OpenCalls

DetokOutbox = Outbox[detok_pb2.Submit, detok_pb2.Output]
SERVICE = "protos.detok.v1.DetokService"


@dataclass(frozen=True)
class DetokScript:
    """Outputs in order, one message each where the reader keeps up. Silence follows the last
    one until an abort, unless it has `finish`. A record that has outputs goes on after so many
    tokens, at a border between outputs.

    gates: before the output of that index, wait for the event. delay_seconds: before each output.
    """

    outputs: Sequence[detok_pb2.Output]
    gates: Mapping[int, asyncio.Event] = field(default_factory=dict)
    delay_seconds: float = 0.0


def output(
    text: str = "",
    num_tokens: int = 1,
    *,
    finish: common_pb2.FinishReason.ValueType | None = None,
    error: TokenlineError | None = None,
    logprobs: Sequence[detok_pb2.TokenLogprobs] = (),
    started: bool = False,
    num_cached_tokens: int = 0,
) -> detok_pb2.Output:
    """One output; token ids are made up, only their number counts for a gateway.

    The last of the tokens settles all there is; without a token, it comes with the finish.
    """
    others = [0] * (num_tokens - 1)
    made = detok_pb2.Output(
        text=text,
        token_ids=range(num_tokens),
        text_lengths=[*others, len(text)][:num_tokens],
        logprob_counts=[*others, len(logprobs)][:num_tokens],
        logprobs=logprobs,
        prefill_started=started,
        num_cached_tokens=num_cached_tokens,
    )
    if finish is not None:
        made.finish.reason = finish
    if error is not None:
        made.finish.reason = common_pb2.FINISH_REASON_ERROR
        made.finish.error.CopyFrom(to_proto(error))
    return made


def pieces(
    *texts: str,
    finish: common_pb2.FinishReason.ValueType | None = common_pb2.FINISH_REASON_STOP,
    **script_fields: Any,
) -> DetokScript:
    """A script that emits one token per text, then ends by `finish` with a token of no text."""
    outputs = [output(text, started=index == 0) for index, text in enumerate(texts)]
    if finish is not None:
        outputs.append(output(finish=finish, started=not texts))
    return DetokScript(outputs, **script_fields)


class _Stream:
    """The sequences of one call, each emitted by its own task."""

    def __init__(self, detok: "ScriptedDetok") -> None:
        self._detok = detok
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def submit(self, submit: detok_pb2.Submit, outbox: DetokOutbox) -> None:
        copy = detok_pb2.Submit.FromString(submit.SerializeToString())
        self._detok.submitted.append(copy)
        self._detok.live.append(copy)
        script = self._detok.script_of(copy)
        task = asyncio.create_task(self._emit(copy, script, outbox))
        self._tasks[copy.sequence_id] = task

    def abort(self, sequence_id: int, outbox: DetokOutbox) -> None:
        task = self._tasks.pop(sequence_id, None)
        if task is None or task.done():
            return
        task.cancel()
        for submit in self._detok.live:
            if submit.sequence_id == sequence_id:
                self._detok.live.remove(submit)
                self._detok.aborted.append(submit)
                break
        finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_CANCELLED)
        outbox.emit(detok_pb2.Output(sequence_id=sequence_id, finish=finish))

    async def _emit(
        self, submit: detok_pb2.Submit, script: DetokScript, outbox: DetokOutbox
    ) -> None:
        num_tokens_left = len(submit.record.output_token_ids)
        for index, scripted in enumerate(script.outputs):
            if num_tokens_left > 0:
                num_tokens_left -= len(scripted.token_ids)
                continue
            if index in script.gates:
                await script.gates[index].wait()
            await asyncio.sleep(script.delay_seconds)
            if scripted.HasField("finish"):
                self._detok.live.remove(submit)
            made = detok_pb2.Output()
            made.CopyFrom(scripted)
            made.sequence_id = submit.sequence_id
            outbox.emit(made)
        if not script.outputs or not script.outputs[-1].HasField("finish"):
            await asyncio.Event().wait()


class ScriptedDetok(detok_pb2_grpc.DetokServiceServicer):
    """DetokService over scripts; `script` may be replaced between requests, or be a callable.

    `submitted`, `live` and `aborted` record the Submits. `loads` are reported with every message.
    """

    def __init__(
        self,
        script: DetokScript | Callable[[detok_pb2.Submit], DetokScript],
        model: common_pb2.ModelIdentity,
    ) -> None:
        self.script = script
        self.model = model
        self.submitted: list[detok_pb2.Submit] = []
        self.live: list[detok_pb2.Submit] = []
        self.aborted: list[detok_pb2.Submit] = []
        self.loads: list[detok_pb2.EngineLoadReport] = []
        self._calls = OpenCalls()

    def script_of(self, submit: detok_pb2.Submit) -> DetokScript:
        return self.script(submit) if callable(self.script) else self.script

    async def Generate(self, request_iterator: Any, context: Any) -> None:
        adapter = detok_adapter(lambda: self.loads)
        await self._calls.serve(serve_stream(request_iterator, context, _Stream(self), adapter))

    def cut(self) -> None:
        self._calls.cut()

    async def GetStatus(self, request: Any, context: Any) -> detok_pb2.GetStatusResponse:
        return detok_pb2.GetStatusResponse(model=self.model)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serves on loopback and yields host:port; leaving the block cuts all its streams."""
        async with GrpcServer("detok_svc", "127.0.0.1", port) as server:
            detok_pb2_grpc.add_DetokServiceServicer_to_server(self, server.grpc)
            await server.start([SERVICE])
            yield server.address
