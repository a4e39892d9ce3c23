"""The limits the scheduler works under, the requests they refuse, and the load beside them."""

from dataclasses import dataclass
from typing import NamedTuple

from engine_svc.planning.errors import (
    ContextLengthExceeded,
    KvCapacityExceeded,
    WaitingQueueFull,
)
from engine_svc.planning.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_num_batched_tokens` is at least `max_num_seqs`, so that every decode fits in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int
    num_blocks: int
    block_size: int
    prefix_cache: bool = True
    # Of one request in one step; 0 for no speculation.
    max_draft_tokens: int = 0
    # 2 to plan a step while the one before it runs. Then there is no speculation.
    max_steps_in_flight: int = 1

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.max_steps_in_flight not in (1, 2):
            raise ValueError(f"max_steps_in_flight is 1 or 2, not {self.max_steps_in_flight}")

    @property
    def max_num_sampled_tokens(self) -> int:
        """The most tokens of a step that are sampled after: each row's own, and drafts."""
        return self.max_num_seqs + self.max_draft_tokens

    @property
    def num_slots(self) -> int:
        """Tokens whose KV the pool can hold."""
        return self.num_blocks * self.block_size

    @property
    def max_servable_len(self) -> int:
        """The longest sequence, prompt and output together, that can come to its end here."""
        return min(self.max_model_len, self.num_slots)

    def check(self, request: Request, num_waiting: int) -> None:
        """Raises RequestRefused for a request that could never finish, or when too many wait."""
        wanted = (
            f"The prompt has {request.num_prompt_tokens} tokens and max_tokens is "
            f"{request.sampling.max_tokens}, together {request.max_num_tokens}"
        )
        if request.max_num_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"{wanted}; the model's context holds {self.max_model_len} tokens."
            )
        if request.max_num_tokens > self.num_slots:
            raise KvCapacityExceeded(
                f"{wanted}; this engine has KV memory for {self.num_slots} tokens."
            )
        if num_waiting >= self.max_waiting:
            raise WaitingQueueFull(f"{num_waiting} requests wait already; try again later.")


class SchedulerLoad(NamedTuple):
    """A snapshot; the fields of protos.common.v1.EngineLoad."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    num_prefix_cache_query_tokens: int
    num_prefix_cache_hit_tokens: int
    num_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
