"""Which tokenizers, detokenizers and engines there are, which may work together, who gets what."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from gateway.lane import AnyLane, DetokLane, EngineLane, TokenizerLane
from gateway.lane_set import LaneSet, LaneT
from gateway.routing import choose_engine, prefix_key
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2
from protos.wire.errors import NotFound, Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ENCODE_ATTEMPTS: Final = 3
_ENCODE_BACKOFF_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class LineModel:
    """The one model that the whole line serves now."""

    name: str
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    # Where a request is silent.
    generation_defaults: tokenizer_pb2.GenerationDefaults = field(
        default_factory=tokenizer_pb2.GenerationDefaults
    )
    tool_call_format: tokenizer_pb2.ToolCallFormat.ValueType = (
        tokenizer_pb2.TOOL_CALL_FORMAT_UNSPECIFIED
    )
    has_reasoning: bool = False

    @property
    def system_fingerprint(self) -> str:
        return f"fp_{self.fingerprint[:12]}"


class Lanes:
    """An async context manager. Replicas are used only while they serve the line's model.

    The line's model is the fingerprint that at least one healthy replica of each service reports;
    it stays until one service has no replica of it left, and of several the one with most engines
    is taken. So a fleet may change its model replica by replica.
    """

    def __init__(
        self, tokenizer: Sequence[str], detok: Sequence[str], engine: Sequence[str]
    ) -> None:
        self._tokenizers = LaneSet("tokenizer", tokenizer, TokenizerLane, self._agree)
        self._detoks = LaneSet("detok", detok, self._open_detok, self._agree)
        self._engines = LaneSet("engine", engine, EngineLane, self._agree)
        self._fingerprint = ""
        self._mismatches: frozenset[str] = frozenset()
        self._num_encodes = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for lane_set in self._sets:
            await self._stack.enter_async_context(lane_set)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def ready(self) -> bool:
        return bool(self._fingerprint)

    def missing(self) -> list[str]:
        """What keeps the line from being ready, in sentences; empty when it is."""
        return [] if self.ready else self._problems()

    def model(self, name: str | None = None) -> LineModel:
        """The line's model. Unavailable while there is none, NotFound when `name` is another's."""
        tokenizers, engines = self._ready(self._tokenizers), self._ready(self._engines)
        if not tokenizers or not engines:
            raise Unavailable(
                f"The line is not ready: {'; '.join(self._problems())}.", code="not_ready"
            )
        tokenizer_status = tokenizers[0].status
        engine_statuses = [lane.status for lane in engines if lane.status is not None]
        assert tokenizer_status is not None
        served = tokenizer_status.model.name
        if name is not None and name != served:
            raise NotFound(
                f"The model `{name}` does not exist; this server has `{served}`.",
                code="model_not_found",
                param="model",
            )
        return LineModel(
            name=served,
            fingerprint=self._fingerprint,
            eos_token_ids=tuple(tokenizer_status.eos_token_ids),
            max_model_len=min(status.max_model_len for status in engine_statuses),
            vocab_size=min(status.vocab_size for status in engine_statuses),
            generation_defaults=tokenizer_status.generation_defaults,
            tool_call_format=tokenizer_status.tool_call_format,
            has_reasoning=tokenizer_status.has_reasoning,
        )

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """A prompt as tokens."""
        return await self._ask_a_tokenizer(lambda lane: lane.encode(request))

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> str:
        """The text of token ids."""
        return await self._ask_a_tokenizer(lambda lane: lane.decode(request))

    async def _ask_a_tokenizer(self, ask: Callable[[TokenizerLane], Awaitable[T]]) -> T:
        """Asks the tokenizers in turn; another is tried when one is away."""
        unavailable = Unavailable("No tokenizer is ready; try again.", code="not_ready")
        for _ in range(_ENCODE_ATTEMPTS):
            ready = self._ready(self._tokenizers)
            if not ready:
                break
            self._num_encodes += 1
            try:
                return await ask(ready[self._num_encodes % len(ready)])
            except Unavailable as error:
                unavailable = error
                await asyncio.sleep(_ENCODE_BACKOFF_SECONDS)
        raise unavailable

    def route(
        self, prompt_token_ids: Sequence[int], cache_salt: str
    ) -> tuple[EngineLane, DetokLane]:
        """The engine by prefix affinity and load, the detokenizer by load."""
        engines = {lane.address: lane for lane in self._ready(self._engines)}
        detoks = self._ready(self._detoks)
        if not engines or not detoks:
            raise Unavailable(
                f"The line is not ready: {'; '.join(self._problems())}.", code="not_ready"
            )
        block_size = max(lane.status.block_size for lane in engines.values() if lane.status)
        address = choose_engine(
            prefix_key(prompt_token_ids, block_size, cache_salt),
            engines,
            lambda address: engines[address].num_sequences,
        )
        return engines[address], min(detoks, key=lambda lane: lane.num_live)

    def engine_loads(self) -> Mapping[str, common_pb2.EngineLoad]:
        return {lane.address: lane.load for lane in self._ready(self._engines)}

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Every replica and its condition, for /readyz."""
        return {
            f"{lane_set.role}s": [
                {
                    "address": lane.address,
                    "ready": self._is_ready(lane),
                    "problem": lane.problem or self._mismatch(lane) or None,
                    "fingerprint": lane.fingerprint or None,
                }
                for lane in lane_set.lanes.values()
            ]
            for lane_set in self._sets
        }

    @property
    def _sets(self) -> "tuple[LaneSet[Any], ...]":
        return (self._tokenizers, self._detoks, self._engines)

    def _open_detok(self, address: str) -> DetokLane:
        return DetokLane(address, self._take_loads)

    def _take_loads(self, reports: Sequence[detok_pb2.EngineLoadReport]) -> None:
        for report in reports:
            lane = self._engines.lanes.get(report.engine_address)
            if lane is not None:
                lane.load = report.load

    def _is_ready(self, lane: AnyLane) -> bool:
        return self.ready and lane.healthy and lane.fingerprint == self._fingerprint

    def _ready(self, lane_set: LaneSet[LaneT]) -> list[LaneT]:
        return [lane for lane in lane_set.lanes.values() if self._is_ready(lane)]

    def _agree(self) -> None:
        """Settles the line's model anew from what the replicas report."""
        reported = [
            [lane.fingerprint for lane in lane_set.lanes.values() if lane.healthy]
            for lane_set in self._sets
        ]
        common = set.intersection(*map(set, reported))
        if self._fingerprint not in common:
            was_ready, engines = self.ready, reported[-1]
            self._fingerprint = max(sorted(common), key=engines.count, default="")
            if self.ready:
                logger.info("the line is ready with %s", self.model().name)
            elif was_ready:
                logger.warning("the line is not ready: %s", "; ".join(self._problems()))
        mismatches = frozenset(
            f"{lane.name} {self._mismatch(lane)}"
            for lane_set in self._sets
            for lane in lane_set.lanes.values()
            if lane.healthy and self._mismatch(lane)
        )
        for mismatch in mismatches - self._mismatches:
            logger.warning("%s", mismatch)
        self._mismatches = mismatches

    def _mismatch(self, lane: AnyLane) -> str:
        """How a healthy lane's model differs from the line's, or from the tokenizers'."""
        expected = {self._fingerprint} if self.ready else self._tokenizer_fingerprints()
        if not expected or lane.fingerprint in expected or not lane.fingerprint:
            return ""
        short = ", ".join(sorted(fingerprint[:12] for fingerprint in expected))
        return f"serves model fingerprint {lane.fingerprint[:12]}, not {short}"

    def _tokenizer_fingerprints(self) -> set[str]:
        return {lane.fingerprint for lane in self._tokenizers.lanes.values() if lane.healthy}

    def _problems(self) -> list[str]:
        problems = []
        for lane_set in self._sets:
            lanes = list(lane_set.lanes.values())
            if not lanes:
                problems.append(f"no {lane_set.role} found at {', '.join(lane_set.targets)}")
            for lane in lanes:
                reason = lane.problem or self._mismatch(lane)
                if reason:
                    problems.append(f"{lane.name} {reason}")
        return problems
