"""The engine's gRPC service: sequences come and go on streams, the engine loop does the work."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from engine_svc.engine_loop import EngineLoop
from engine_svc.grammar_gate import Compiler, GrammarGate
from engine_svc.messages import load_to_proto, output_to_proto, request_from_record
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.ngram_drafter import drafter_for
from engine_svc.planning.request import Request, RequestOutput
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.step_profile import StepProfile
from engine_svc.step_runner import Executor
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.wire.errors import Unavailable
from protos.wire.logs import request_context
from protos.wire.multiplex_server import Outbox, serve_stream
from protos.wire.stream_adapter import engine_adapter

logger = logging.getLogger(__name__)

EngineOutbox = Outbox[engine_pb2.Submit, engine_pb2.Output]


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """Names a request to the scheduler and says where its outputs go."""

    outbox: EngineOutbox
    sequence_id: int
    request_id: str = field(default="", compare=False)
    traceparent: str = field(default="", compare=False)


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Serves one model. An async context manager, which computes on `thread`.

    `on_failure` is called when the engine cannot go on; `failure` then says why, and `hangs`
    whether its thread is stuck: after a step of `step_timeout_seconds`. Without a `compiler`,
    requests with a grammar are refused.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        model: common_pb2.ModelIdentity,
        on_failure: Callable[[], None],
        thread: ThreadPoolExecutor,
        compiler: Compiler | None = None,
        step_timeout_seconds: float = math.inf,
        profile: StepProfile | None = None,
        stream_interval_seconds: float = 0.0,
    ) -> None:
        scheduler = Scheduler(config, drafter_for(config))
        self._engine = EngineLoop(
            scheduler,
            executor,
            self._deliver,
            on_failure,
            thread,
            step_timeout_seconds,
            profile,
            stream_interval_seconds,
        )
        self._gate = GrammarGate(compiler, self._engine.submit, self._deliver)
        self._vocab_size = executor.vocab_size
        self._config = config
        self._model = model
        self._adapter = engine_adapter(lambda: load_to_proto(self._engine.load))
        self._num_live = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def failure(self) -> Exception | None:
        return self._engine.failure

    @property
    def num_live(self) -> int:
        """Sequences that have no finish yet, those that wait for their grammar included."""
        return self._num_live

    @property
    def hangs(self) -> bool:
        return self._engine.hangs

    async def __aenter__(self) -> Self:
        await self._engine.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gate.fail_all(_engine_draining())
        await self._engine.__aexit__(kind, error, traceback)

    # The gRPC methods

    # grpc.aio also takes a coroutine that writes to the context; the type stubs do not know it.
    async def Generate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[engine_pb2.GenerateRequest], context: Any
    ) -> None:
        await serve_stream(request_iterator, context, self, self._adapter)

    async def GetStatus(
        self, request: engine_pb2.GetStatusRequest, context: Any
    ) -> engine_pb2.GetStatusResponse:
        return engine_pb2.GetStatusResponse(
            model=self._model,
            vocab_size=self._vocab_size,
            max_model_len=self._config.max_servable_len,
            max_num_seqs=self._config.max_num_seqs,
            block_size=self._config.block_size,
            load=load_to_proto(self._engine.load),
        )

    # The commands of a stream

    def submit(self, submit: engine_pb2.Submit, outbox: EngineOutbox) -> None:
        if self._draining:
            raise _engine_draining()
        key = SequenceKey(outbox, submit.sequence_id, submit.request_id, submit.traceparent)
        now = time.monotonic()
        self._gate.admit(request_from_record(submit.record, key, self._vocab_size, now))
        self._num_live += 1
        self._idle.clear()

    def abort(self, sequence_id: int, outbox: EngineOutbox) -> None:
        key = SequenceKey(outbox, sequence_id)
        if not self._gate.abort(key):
            self._engine.abort(key)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            key = output.request.key
            assert isinstance(key, SequenceKey)
            key.outbox.emit(output_to_proto(output, key.sequence_id))
            if output.finish is not None:
                self._num_live -= 1
                _log_finish(key, output.request)
        if not self._num_live:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Refuses new sequences, lets those that run end for so long, then ends them.

        What waits ends at once: by going elsewhere it loses nothing, or what it has to compute
        again here too. All end as UNAVAILABLE: they are not at fault, and can be continued.
        """
        self._draining = True
        self._gate.fail_all(_engine_draining())
        self._engine.fail_all(_engine_draining(), running=False)
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            logger.warning("%d sequences still run after %s s", self._num_live, seconds)
            self._engine.fail_all(_engine_draining())
            await self._idle.wait()


def _engine_draining() -> Unavailable:
    return Unavailable("This engine is shutting down.", code="engine_draining")


def _log_finish(key: SequenceKey, request: Request) -> None:
    finish = request.finish
    assert finish is not None
    with request_context(key.request_id, key.traceparent):
        logger.info(
            "finished: %s, %d prompt tokens (%d cached), %d output tokens%s",
            finish.reason.value,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_tokens - request.num_prompt_tokens,
            f", {finish.error}" if finish.error else "",
        )
