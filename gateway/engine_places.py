"""How many sequences the engines can take now, and how many they hold at once."""

from collections.abc import Callable, Sequence
from typing import Final

from gateway.lane import EngineLane
from protos.common.v1 import common_pb2

# An engine has so many more than it runs, so that it need not wait for us when some end.
_LOOK_AHEAD_SHARE: Final = 0.125
_MIN_LOOK_AHEAD: Final = 2


class EnginePlaces:
    """Read off the engines' reports and what this gateway has sent them since.

    Gateways that share engines see each other's sequences in the reports.
    """

    def __init__(self, engines: Callable[[], Sequence[EngineLane]]) -> None:
        self._engines = engines
        # Of each engine: its last report, and how many sequences of it were not ours then.
        self._others: dict[str, tuple[common_pb2.EngineLoad, int]] = {}
        # As last seen: an engine that restarts is not to change who may wait.
        self._capacity = 1
        self._num_kv_tokens = 0

    @property
    def has_engines(self) -> bool:
        return bool(self._engines())

    @property
    def num_free(self) -> int:
        """Sequences that may be sent now."""
        return sum(
            num_free_places(lane, lane.num_own_sequences + self._num_of_others(lane))
            for lane in self._engines()
        )

    @property
    def num_running(self) -> int:
        """Sequences of this gateway that the engines have."""
        return sum(lane.num_own_sequences for lane in self._engines())

    @property
    def capacity(self) -> int:
        """Sequences that the engines run at once; the last ones, while there are none."""
        self._look()
        return self._capacity

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the engines' KV caches hold."""
        self._look()
        return self._num_kv_tokens

    def _num_of_others(self, lane: EngineLane) -> int:
        """Those were in its last report; what we have sent since then is ours."""
        report, num_others = self._others.get(lane.address, (None, 0))
        if report is not lane.load:
            reported = lane.load.num_running + lane.load.num_waiting
            num_others = max(0, reported - lane.num_own_sequences)
            self._others[lane.address] = (lane.load, num_others)
        return num_others

    def _look(self) -> None:
        statuses = [lane.status for lane in self._engines() if lane.status is not None]
        if statuses:
            self._capacity = max(1, sum(status.max_num_seqs for status in statuses))
            self._num_kv_tokens = sum(
                min(
                    status.load.num_blocks * status.block_size,
                    status.max_num_seqs * status.max_model_len,
                )
                for status in statuses
            )


def num_free_places(lane: EngineLane, num_sequences: int) -> int:
    """Sequences that an engine which has `num_sequences` may be sent now.

    An engine whose own queue is long is short of KV blocks, or has long prompts to compute.
    """
    if lane.status is None:
        return 0
    max_num_seqs = lane.status.max_num_seqs
    look_ahead = max(_MIN_LOOK_AHEAD, int(_LOOK_AHEAD_SHARE * max_num_seqs))
    if lane.load.num_waiting >= 2 * look_ahead:
        return 0
    return max(0, max_num_seqs + look_ahead - num_sequences)
