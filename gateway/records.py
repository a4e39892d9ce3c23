"""The record of a request: what the ledger keeps and GET /v1/requests/{id} shows."""

import copy
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from protos.common.v1 import common_pb2

FINISH_REASONS: Final[dict[int, str]] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    common_pb2.FINISH_REASON_TIMEOUT: "timeout",
    common_pb2.FINISH_REASON_ERROR: "error",
}
# Of several choices, the reason least like a plain end stands for the request.
_GRAVITY: Final = ("stop", "tool_calls", "length", "timeout", "cancelled", "error")


class Stage(StrEnum):
    """Where a request is. It only moves down this list."""

    PREPROCESSING = "preprocessing"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request. `*_at` are unix seconds, None for a stage not reached; seed is the first
    choice's. `incarnation` tells two requests of one id apart. Written by the gateway `owner` only,
    which has the highest `epoch`; released: that has handed it over, and whoever comes may take it.
    """

    id: str
    incarnation: str
    owner: str
    endpoint: str
    model: str
    seed: int
    num_choices: int
    # The name of the API key it came with; only the same key sees it. Empty where none is needed.
    tenant: str = ""
    epoch: int = 1
    released: bool = False
    state: Stage = Stage.PREPROCESSING
    preprocessing_at: float | None = None
    waiting_at: float | None = None
    prefilling_at: float | None = None
    decoding_at: float | None = None
    finished_at: float | None = None
    engine: str = ""
    detok: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    error_code: str | None = None
    error_message: str | None = None

    def taken_over(self, owner: str, epoch: int) -> "RequestRecord":
        """The record of the same request at its next gateway, where it is live and counted anew."""
        taken = copy.copy(self)
        taken.owner, taken.epoch, taken.released = owner, epoch, False
        taken.num_prompt_tokens = 0
        if not taken.is_live:
            # Its end was noted, but what it ended with is lost.
            taken.state, taken.finished_at, taken.finish_reason = Stage.DECODING, None, None
            taken.error_code = taken.error_message = None
        return taken

    @property
    def is_live(self) -> bool:
        return self.state is not Stage.FINISHED

    def to_hash(self) -> dict[str, str]:
        """As a Redis hash; fields that are None are left out."""
        fields = msgspec.to_builtins(self)
        return {name: str(value) for name, value in fields.items() if value is not None}

    @classmethod
    def from_hash(cls, fields: Mapping[str, str]) -> "RequestRecord":
        """Raises msgspec.ValidationError on a hash of another make."""
        return msgspec.convert(dict(fields), cls, strict=False)

    def to_json(self) -> dict[str, Any]:
        """As the API shows it."""
        error = None
        if self.error_message is not None:
            error = {"code": self.error_code, "message": self.error_message}
        return {
            "id": self.id,
            "object": "request",
            "state": self.state,
            "finish_reason": self.finish_reason,
            "error": error,
            "endpoint": self.endpoint,
            "model": self.model,
            "created": self.preprocessing_at,
            "stage_times": {
                stage.value: getattr(self, f"{stage.value}_at")
                for stage in Stage
                if getattr(self, f"{stage.value}_at") is not None
            },
            "num_choices": self.num_choices,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "seed": self.seed,
            "engine": self.engine or None,
            "detok": self.detok or None,
            "gateway": self.owner,
        }


def gravest(reasons: list[str]) -> str:
    """The finish reason of a request whose choices ended with `reasons`."""
    return max(reasons, key=_GRAVITY.index)
