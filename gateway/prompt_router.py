"""Where the sequences of one prompt go, the first time and again after a loss."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

from gateway.changes import Changes
from gateway.engine_places import num_free_places
from gateway.lane import AnyLane, DetokLane, EngineLane
from gateway.routing import choose_engine, prefix_key

LaneT = TypeVar("LaneT", bound=AnyLane)


class Route(NamedTuple):
    """The replicas that a sequence depends on."""

    engine: EngineLane
    detok: DetokLane

    @property
    def suspect(self) -> bool:
        return self.engine.suspect or self.detok.suspect


class PromptRouter:
    """Keeps the choices of one prompt on one engine, which then computes the prompt once.

    ready: the engines and detokenizers that may be used now; raises Unavailable while there are
    none. changes: rings when it may answer otherwise. recovery_seconds: how long a sequence may
    wait for replicas. may_wait: whether it is worth waiting for replicas that were never tried.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        cache_salt: str,
        *,
        ready: Callable[[], tuple[list[EngineLane], list[DetokLane]]],
        may_wait: Callable[[], bool],
        changes: Changes,
        recovery_seconds: float,
    ) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._cache_salt = cache_salt
        self._ready = ready
        self._engine: EngineLane | None = None
        self.may_wait = may_wait
        self.changes = changes
        self.recovery_seconds = recovery_seconds

    def route(self, avoid: Collection[AnyLane] = ()) -> Route:
        """The engine by prefix affinity and load, the detokenizer by load.

        Suspect lanes and those of `avoid` are taken only when there are no others. Raises
        Unavailable.
        """
        ready_engines, ready_detoks = self._ready()
        engines = _preferred(ready_engines, avoid)
        if self._engine not in engines:
            self._engine = self._choose(engines)
        assert self._engine is not None
        detok = min(_preferred(ready_detoks, avoid), key=lambda lane: lane.num_live)
        return Route(self._engine, detok)

    def _choose(self, lanes: Sequence[EngineLane]) -> EngineLane:
        # A prompt that is in the cache of an engine is not to wait there while another has a place.
        with_places = [lane for lane in lanes if num_free_places(lane, lane.num_sequences)]
        engines = {lane.address: lane for lane in with_places or lanes}
        block_size = max(lane.status.block_size for lane in lanes if lane.status)
        address = choose_engine(
            prefix_key(self._prompt_token_ids, block_size, self._cache_salt),
            engines,
            lambda address: engines[address].num_sequences,
        )
        return engines[address]


def _preferred(lanes: list[LaneT], avoid: Collection[AnyLane]) -> list[LaneT]:
    trusted = [lane for lane in lanes if not lane.suspect]
    return [lane for lane in trusted if lane not in avoid] or trusted or lanes
