"""The detokenizer over a scripted engine: in process, step by step, or as services on sockets."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from detok_svc.engine_link import EngineLinks
from detok_svc.sequence_start import start_sequence
from detok_svc.service import SERVICE, DetokService
from detok_svc.stop_strings import StopAutomata
from detok_svc.token_bytes import TokenBytes
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2, detok_pb2_grpc
from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.multiplex_client import StreamClient
from protos.wire.server import GrpcServer
from protos.wire.stream_adapter import detok_adapter
from tests.fakes.engine_script import Script, ScriptedSequence
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_tokenizers import byte_level

MODEL = common_pb2.ModelIdentity(name="tiny", fingerprint="f00d")


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer.to_str().encode())


def with_pieces(*pieces: str) -> tuple[Tokenizer, list[int]]:
    """BL with a token for each of `pieces`, and their ids."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return tokenizer, [tokenizer.token_to_id(piece) for piece in pieces]


def new_submit(
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    max_tokens: int = 1000,
    eos: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    top_logprobs: int | None = None,
    top_prompt_logprobs: int | None = None,
    skip_special_tokens: bool = True,
    **fields: Any,
) -> detok_pb2.Submit:
    """A Submit; `top_…` None asks for no log-probabilities."""
    sampling = common_pb2.SamplingParameters(
        max_tokens=max_tokens,
        eos_token_ids=eos,
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
        prompt_logprobs=top_prompt_logprobs is not None,
        top_prompt_logprobs=top_prompt_logprobs or 0,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
    )
    record = common_pb2.GenerationRecord(
        prompt_token_ids=prompt, output_token_ids=output, sampling=sampling
    )
    return detok_pb2.Submit(record=record, skip_special_tokens=skip_special_tokens, **fields)


@dataclass(frozen=True)
class Answer:
    """Outputs of a sequence, and their sum."""

    outputs: list[detok_pb2.Output]

    @property
    def deltas(self) -> list[str]:
        return [output.text for output in self.outputs]

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def logprobs(self) -> list[detok_pb2.TokenLogprobs]:
        return [entry for output in self.outputs for entry in output.logprobs]

    @property
    def prompt_logprobs(self) -> list[detok_pb2.TokenLogprobs]:
        return [entry for output in self.outputs for entry in output.prompt_logprobs]

    @property
    def shown_ids(self) -> list[int]:
        """Ids of the tokens whose log-probabilities are listed."""
        return [entry.token.token_id for entry in self.logprobs]

    @property
    def finish(self) -> common_pb2.Finish:
        assert [output.HasField("finish") for output in self.outputs].index(True) == (
            len(self.outputs) - 1
        )
        return self.outputs[-1].finish

    @property
    def summary(self) -> tuple[Any, ...]:
        """All that must not depend on grouping or breaks."""
        logprobs = [entry.SerializeToString(deterministic=True) for entry in self.logprobs]
        return self.text, self.token_ids, logprobs, self.finish.SerializeToString()


def run_in_process(submit: detok_pb2.Submit, script: Script, tokens: TokenBytes) -> Answer:
    """The answer to `submit`; the engine makes no step after the detokenizer's finish."""
    start = start_sequence(submit, tokens, StopAutomata())
    if isinstance(start, detok_pb2.Output):
        return Answer([start])
    engine = ScriptedSequence(start.engine_submit, script)
    outputs = []
    while not start.stream.finished:
        engine_output = engine.next_output()
        assert engine_output is not None, "the script is silent and nothing has ended"
        output = start.stream.take(engine_output)
        if output is not None:
            outputs.append(output)
    return Answer(outputs)


@dataclass(frozen=True)
class DetokLine:
    """A detokenizer service, the scripted engine behind it and a gateway's end of its stream."""

    engine: ScriptedEngine
    engine_address: str
    engines: EngineLinks
    service: DetokService
    address: str
    stub: Any
    client: StreamClient[detok_pb2.Submit, detok_pb2.Output]

    async def generate(self, submit: detok_pb2.Submit) -> Answer:
        submit.engine_address = submit.engine_address or self.engine_address
        async with self.client.open(submit) as outputs:
            return Answer([output async for output in outputs])


@asynccontextmanager
async def detok_line(
    tokens: TokenBytes,
    engine: ScriptedEngine,
    *,
    engine_idle_seconds: float = 60.0,
    on_response: Any = None,
) -> AsyncIterator[DetokLine]:
    async with (
        engine.serving() as engine_address,
        EngineLinks(engine_idle_seconds) as engines,
        GrpcServer("detok_svc", "127.0.0.1", 0) as server,
    ):
        service = DetokService(MODEL, tokens, engines)
        detok_pb2_grpc.add_DetokServiceServicer_to_server(service, server.grpc)
        await server.start([SERVICE])
        async with open_channel(server.address) as channel:
            stub = detok_pb2_grpc.DetokServiceStub(channel)
            async with StreamClient(
                stub.Generate, detok_adapter(), lost_code="detok_lost", on_response=on_response
            ) as client:
                yield DetokLine(
                    engine, engine_address, engines, service, server.address, stub, client
                )


class StubTokenizerService(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves one tokenizer's JSON under a fingerprint that a test may change."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.fingerprint = MODEL.fingerprint
        self.num_status_calls = 0
        self._tokenizer_json = tokenizer.to_str().encode()

    @property
    def _model(self) -> common_pb2.ModelIdentity:
        return common_pb2.ModelIdentity(name=MODEL.name, fingerprint=self.fingerprint)

    async def Encode(self, request: Any, context: Any) -> tokenizer_pb2.EncodeResponse:
        raise NotImplementedError

    async def GetStatus(self, request: Any, context: Any) -> tokenizer_pb2.GetStatusResponse:
        self.num_status_calls += 1
        return tokenizer_pb2.GetStatusResponse(model=self._model)

    async def GetTokenizer(self, request: Any, context: Any) -> tokenizer_pb2.GetTokenizerResponse:
        return tokenizer_pb2.GetTokenizerResponse(
            model=self._model, tokenizer_json=self._tokenizer_json
        )

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        async with GrpcServer("tokenizer_svc", "127.0.0.1", port) as server:
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server.grpc)
            await server.start(["protos.tokenizer.v1.TokenizerService"])
            yield server.address
