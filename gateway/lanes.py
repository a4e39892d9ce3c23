"""Which tokenizers, detokenizers and engines there are, which may work together, who gets what."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from gateway.changes import Changes
from gateway.lane import AnyLane, DetokLane, EngineLane, TokenizerLane
from gateway.lane_set import LaneSet, LaneT
from gateway.prompt_router import PromptRouter
from gateway.tokenizer_calls import TokenizerCalls
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2
from protos.wire.errors import NotFound, Unavailable

logger = logging.getLogger(__name__)


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

    recovery_seconds: for so long after the line was last ready, requests wait for it to be so
    again; later ones are refused at once.
    """

    def __init__(
        self,
        tokenizer: Sequence[str],
        detok: Sequence[str],
        engine: Sequence[str],
        recovery_seconds: float = 60.0,
    ) -> None:
        self._tokenizers = LaneSet("tokenizer", tokenizer, TokenizerLane, self._agree)
        self._detoks = LaneSet("detok", detok, self._open_detok, self._agree)
        self._engines = LaneSet("engine", engine, EngineLane, self._agree)
        self._fingerprint = ""
        self._mismatches: frozenset[str] = frozenset()
        self._recovery_seconds = recovery_seconds
        self._changes = Changes()
        self._usable: frozenset[AnyLane] = frozenset()
        # The model when the line was last ready, and when that was, on the event loop's clock.
        self._last_model: LineModel | None = None
        self._last_ready_at = 0.0
        self._tokenizer_calls = TokenizerCalls(
            self._usable_tokenizers, self._changes, recovery_seconds
        )
        # Called with each report of engines' loads.
        self.on_loads: Callable[[], None] = lambda: None
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

    @property
    def recovering(self) -> bool:
        """Whether the line is not ready but was a moment ago: it may be restarting."""
        seconds_away = asyncio.get_running_loop().time() - self._last_ready_at
        is_known = self._last_model is not None
        return is_known and not self.ready and seconds_away < self._recovery_seconds

    def model(self, name: str | None = None) -> LineModel:
        """The line's model, also while the line recovers.

        Unavailable while there is none, NotFound when `name` is another's.
        """
        model = self._model_now()
        if model is None and self.recovering:
            model = self._last_model
        if model is None:
            raise self._not_ready()
        if name is not None and name != model.name:
            raise NotFound(
                f"The model `{name}` does not exist; this server has `{model.name}`.",
                code="model_not_found",
                param="model",
            )
        return model

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """A prompt as tokens."""
        return await self._tokenizer_calls.ask(lambda lane: lane.encode(request))

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> str:
        """The text of token ids."""
        return await self._tokenizer_calls.ask(lambda lane: lane.decode(request))

    def router(
        self, prompt_token_ids: Sequence[int], cache_salt: str, fingerprint: str
    ) -> PromptRouter:
        """Says where the sequences of a prompt go, now and after a loss.

        Only replicas of the model `fingerprint` are used, whichever the line's model is by then:
        ids of one model mean nothing to another.
        """
        return PromptRouter(
            prompt_token_ids,
            cache_salt,
            ready=lambda: self._routable(fingerprint),
            may_wait=lambda: self.recovering,
            changes=self._changes,
            recovery_seconds=self._recovery_seconds,
        )

    def _usable_tokenizers(self) -> list[TokenizerLane]:
        """Also while the line recovers: an engine that restarts keeps no prompt from being read."""
        if self.recovering and self._last_model is not None:
            return self._serving(self._tokenizers, self._last_model.fingerprint)
        return self._ready(self._tokenizers)

    def _routable(self, fingerprint: str) -> tuple[list[EngineLane], list[DetokLane]]:
        engines = self._serving(self._engines, fingerprint)
        detoks = self._serving(self._detoks, fingerprint)
        if not engines or not detoks:
            raise self._not_ready()
        return engines, detoks

    def ready_engines(self) -> list[EngineLane]:
        return self._ready(self._engines)

    def engine_loads(self) -> Mapping[str, common_pb2.EngineLoad]:
        return {lane.address: lane.load for lane in self._ready(self._engines)}

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Every replica and its condition, for /readyz."""
        return {
            f"{lane_set.role}s": [self._describe(lane) for lane in lane_set.lanes.values()]
            for lane_set in self._sets
        }

    def _describe(self, lane: AnyLane) -> dict[str, Any]:
        problem = self._problem_of(lane)
        return {
            "address": lane.address,
            # Also while others keep the line from being ready.
            "ready": not problem,
            "problem": problem or None,
            "fingerprint": lane.fingerprint or None,
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
        self.on_loads()

    def _serving(self, lane_set: LaneSet[LaneT], fingerprint: str) -> list[LaneT]:
        lanes = lane_set.lanes.values()
        return [lane for lane in lanes if lane.healthy and lane.fingerprint == fingerprint]

    def _ready(self, lane_set: LaneSet[LaneT]) -> list[LaneT]:
        return self._serving(lane_set, self._fingerprint) if self.ready else []

    def _agree(self) -> None:
        """Settles the line's model anew from what the replicas report."""
        reported = [
            [lane.fingerprint for lane in lane_set.lanes.values() if lane.healthy]
            for lane_set in self._sets
        ]
        common = set.intersection(*map(set, reported))
        was_ready = self.ready
        if self._fingerprint not in common:
            engines = reported[-1]
            self._fingerprint = max(sorted(common), key=engines.count, default="")
            if self.ready:
                logger.info("the line is ready with %s", self.model().name)
            elif was_ready:
                logger.warning("the line is not ready: %s", "; ".join(self._problems()))
        self._last_model = self._model_now() or self._last_model
        if was_ready or self.ready:
            self._last_ready_at = asyncio.get_running_loop().time()
        self._note_changes()
        mismatches = frozenset(
            f"{lane.name} {self._mismatch(lane)}"
            for lane_set in self._sets
            for lane in lane_set.lanes.values()
            if lane.healthy and self._mismatch(lane)
        )
        for mismatch in mismatches - self._mismatches:
            logger.warning("%s", mismatch)
        self._mismatches = mismatches

    def _model_now(self) -> LineModel | None:
        tokenizers, engines = self._ready(self._tokenizers), self._ready(self._engines)
        if not tokenizers or not engines:
            return None
        status = tokenizers[0].status
        engine_statuses = [lane.status for lane in engines if lane.status is not None]
        assert status is not None
        return LineModel(
            name=status.model.name,
            fingerprint=self._fingerprint,
            eos_token_ids=tuple(status.eos_token_ids),
            max_model_len=min(status.max_model_len for status in engine_statuses),
            vocab_size=min(status.vocab_size for status in engine_statuses),
            generation_defaults=status.generation_defaults,
            tool_call_format=status.tool_call_format,
            has_reasoning=status.has_reasoning,
        )

    def _note_changes(self) -> None:
        """Wakes those who wait, where there are replicas that were not usable before."""
        lanes = (lane for lane_set in self._sets for lane in lane_set.lanes.values())
        usable = frozenset(lane for lane in lanes if lane.healthy and not lane.suspect)
        if usable - self._usable:
            self._changes.ring()
        self._usable = usable

    def _not_ready(self) -> Unavailable:
        problems = self._problems() or ["it serves another model now"]
        return Unavailable(
            f"The line is not ready: {'; '.join(problems)}. Try again in a while.",
            code="not_ready",
        )

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
                if problem := self._problem_of(lane):
                    problems.append(f"{lane.name} {problem}")
        return problems

    def _problem_of(self, lane: AnyLane) -> str:
        """Why a replica cannot be used; empty when it can."""
        return lane.problem or self._mismatch(lane)
