"""Services that a test starts, stops and cuts one by one, and the gateway's lanes to them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from detok_svc.engine_link import EngineLinks
from detok_svc.service import SERVICE, DetokService
from detok_svc.token_bytes import TokenBytes
from gateway.lanes import Lanes
from gateway.metrics import Metrics
from gateway.sequence import Sequence
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2, detok_pb2_grpc
from protos.engine.v1 import engine_pb2
from protos.wire.errors import StartupError
from protos.wire.server import GrpcServer
from tests.fakes.detok_line import Answer, token_bytes
from tests.fakes.engine_script import Script
from tests.fakes.open_calls import OpenCalls
from tests.fakes.ports import free_port
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.scripted_tokenizer import ScriptedTokenizer
from tests.fakes.tiny_tokenizers import byte_level
from tests.fakes.waiting import until

IDENTITY = common_pb2.ModelIdentity(name="tiny", fingerprint="f" * 64)


class Replica:
    """A service on a port of its own, which can be stopped and started again."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.port = free_port()
        self._has_started = False
        self._stack = contextlib.AsyncExitStack()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        try:
            await self._stack.enter_async_context(self.service.serving(self.port))
        except StartupError:
            if self._has_started:
                raise
            # Somebody else has taken the port since it was chosen.
            self.port = free_port()
            await self._stack.enter_async_context(self.service.serving(self.port))
        self._has_started = True

    async def stop(self) -> None:
        """Cuts all its streams, and refuses connections."""
        await self._stack.aclose()


class RealDetok(DetokService):
    """The detokenizer service over BL, whose streams a test can cut."""

    def __init__(self, tokens: TokenBytes, engines: EngineLinks) -> None:
        super().__init__(IDENTITY, tokens, engines)
        self._calls = OpenCalls()

    async def Generate(self, request_iterator: Any, context: Any) -> None:
        await self._calls.serve(super().Generate(request_iterator, context))

    def cut(self) -> None:
        self._calls.cut()

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        async with GrpcServer("detok_svc", "127.0.0.1", port) as server:
            detok_pb2_grpc.add_DetokServiceServicer_to_server(self, server.grpc)
            await server.start([SERVICE])
            yield server.address


@dataclass
class Received:
    """What the sink of a sequence got."""

    outputs: list[detok_pb2.Output] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: detok_pb2.Output) -> None:
        assert not self.ended.is_set(), "an output came after the finish"
        self.outputs.append(output)
        if output.HasField("finish"):
            self.ended.set()

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    async def answer(self) -> Answer:
        await asyncio.wait_for(self.ended.wait(), 30)
        return Answer(self.outputs)


@dataclass
class Fleet:
    """A line of replicas of which none is the gateway; `lanes` are a gateway's."""

    tokenizers: list[Replica]
    detoks: list[Replica]
    engines: list[Replica]
    lanes: Lanes
    metrics: Metrics

    def begin(
        self, submit: detok_pb2.Submit, *, router: Any = None, deadline: float | None = None
    ) -> tuple[Sequence, Received]:
        received = Received()
        router = router or self.router(submit)
        sequence = Sequence(submit, router, received.take, self.metrics, deadline=deadline)
        sequence.start()
        return sequence, received

    def router(self, submit: detok_pb2.Submit) -> Any:
        return self.lanes.router(submit.record.prompt_token_ids, "", IDENTITY.fingerprint)

    async def generate(self, submit: detok_pb2.Submit) -> Answer:
        _, received = self.begin(submit)
        return await received.answer()

    async def until_all_ready(self) -> None:
        def all_ready() -> bool:
            described = self.lanes.describe().values()
            return all(replica["ready"] for replicas in described for replica in replicas)

        await until(all_ready, "every replica to be ready")


@asynccontextmanager
async def fleet(
    script: Script | Callable[[engine_pb2.Submit], Script],
    *,
    num_tokenizers: int = 1,
    num_detoks: int = 1,
    num_engines: int = 1,
    recovery_seconds: float = 60.0,
) -> AsyncIterator[Fleet]:
    """All replicas started, and ready; detokenizers are real, engines and tokenizers scripted."""
    async with EngineLinks(60.0) as links, contextlib.AsyncExitStack() as stack:
        tokens = token_bytes(byte_level())
        tokenizers = [Replica(ScriptedTokenizer(IDENTITY)) for _ in range(num_tokenizers)]
        detoks = [Replica(RealDetok(tokens, links)) for _ in range(num_detoks)]
        engines = [Replica(ScriptedEngine(script, model=IDENTITY)) for _ in range(num_engines)]
        for replica in (*tokenizers, *engines, *detoks):
            await replica.start()
            stack.push_async_callback(replica.stop)
        addresses = [
            tuple(replica.address for replica in replicas)
            for replicas in (tokenizers, detoks, engines)
        ]
        async with Lanes(*addresses, recovery_seconds) as lanes:
            made = Fleet(tokenizers, detoks, engines, lanes, Metrics())
            await made.until_all_ready()
            yield made
