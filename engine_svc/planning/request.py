"""A request as the scheduler sees it: its tokens, how far they are computed, and its end."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from engine_svc.planning.prefix_index import BlockHashes
from engine_svc.planning.repetition import Repetition
from engine_svc.planning.step import SampledToken, SamplingParameters, TokenLogprobs


class RequestStatus(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended.

    `stop_token_id` is set when one of the request's stop tokens ended it, `error` with ERROR.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    error: Exception | None = None


_STOP: Final = Finish(FinishReason.STOP)
_LENGTH: Final = Finish(FinishReason.LENGTH)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way from its prompt to its finish.

    `key` names it to whoever submitted it and is unique among live requests. `token_ids` is the
    prompt followed by all outputs, those of an earlier engine included; the difference between its
    length and `num_computed_tokens` is what is left to compute. All other state follows from these,
    `row`, `block_ids` and `finish`. Only the scheduler changes a request.
    """

    key: Hashable
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParameters
    priority: int = 0
    cache_salt: str = ""
    # By the clock whose times the scheduler is given.
    deadline: float = math.inf
    # Counts up in the order in which requests were added.
    arrival: int = field(default=-1, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    # The place in the running batch; None while waiting.
    row: int | None = field(default=None, init=False)
    # The block table: KV of token t lies in block_ids[t // block_size].
    block_ids: list[int] = field(default_factory=list, init=False)
    block_hashes: BlockHashes | None = field(default=None, init=False)
    repetition: Repetition | None = field(default=None, init=False)
    num_preemptions: int = field(default=0, init=False)
    # Prompt tokens that the prefix cache held when the request first started.
    num_cached_tokens: int = field(default=0, init=False)
    # How many log-probabilities of prompt tokens are computed; they wait for the last of them.
    num_prompt_logprobs: int = field(default=0, init=False)
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    finish: Finish | None = field(default=None, init=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def max_num_tokens(self) -> int:
        """The length, prompt and output together, that the request may reach."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def max_num_draft_tokens(self) -> int:
        """How many of the next tokens may be guessed, for a request that is being decoded.

        Not the last possible one, after which nothing is sampled; and what a grammar allows after a
        guess is not known before the guess is sampled.
        """
        if self.sampling.grammar is not None:
            return 0
        return self.max_num_tokens - len(self.token_ids) - 1

    @property
    def needs_tokens_on_host(self) -> bool:
        """Whether what may come next is worked out from its tokens before a step is launched."""
        sampling = self.sampling
        return sampling.grammar is not None or (
            bool(sampling.bad_words) and any(len(word) > 1 for word in sampling.bad_words)
        )

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether it asked for log-probabilities of its prompt, and some are still to come."""
        return (
            self.sampling.prompt_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    @property
    def max_num_cached_tokens(self) -> int:
        """How many of its first tokens need not be computed when their KV is cached already."""
        return self.num_prompt_logprobs if self.lacks_prompt_logprobs else self.num_tokens - 1

    def take_prompt_logprobs(
        self, num_computed_tokens: int, logprobs: Sequence[TokenLogprobs]
    ) -> tuple[TokenLogprobs, ...]:
        """Takes in what a step that began at `num_computed_tokens` found; returns all at the end.

        After a preemption some come a second time.
        """
        new = logprobs[self.num_prompt_logprobs - num_computed_tokens :]
        self._prompt_logprobs += new
        self.num_prompt_logprobs += len(new)
        if self.lacks_prompt_logprobs:
            return ()
        complete = tuple(self._prompt_logprobs)
        self._prompt_logprobs.clear()
        return complete

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests: the smaller is served first and preempted last."""
        return (-self.priority, self.arrival)

    @property
    def status(self) -> RequestStatus:
        if self.finish is not None:
            return RequestStatus.FINISHED
        if self.row is None:
            return RequestStatus.WAITING
        if self.num_tokens - self.num_computed_tokens > 1:
            return RequestStatus.PREFILLING
        return RequestStatus.DECODING

    def finish_by_rules(self, completes: bool = False) -> Finish | None:
        """The finish that the newest token brings, if any; `completes` as in SampledToken.

        What stops a sequence wins over the length that it happens to reach. max_tokens is the only
        length to look at: the scheduler refuses requests whose max_tokens is more than the room.
        """
        num_tokens = len(self.token_ids)
        if num_tokens == self.num_prompt_tokens:
            return None
        token_id = self.token_ids[-1]
        sampling = self.sampling
        if token_id in sampling.eos_token_ids:
            return _STOP
        if token_id in sampling.stop_token_ids:
            return Finish(FinishReason.STOP, stop_token_id=token_id)
        if completes:
            return _STOP
        if num_tokens >= self.num_prompt_tokens + sampling.max_tokens:
            return _LENGTH
        return None

    def take_several(
        self, tokens: Sequence[SampledToken]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...], Finish | None]:
        """Appends tokens up to the one that ends the request; returns those, what is listed of
        them, and the finish."""
        finish = None
        num_taken = 0
        for token in tokens:
            self.token_ids.append(token.token_id)
            num_taken += 1
            finish = self.finish_by_rules(token.completes)
            if finish is not None:
                break
        taken = tokens[:num_taken]
        logprobs = tuple(token.logprobs for token in taken if token.logprobs is not None)
        return tuple(token.token_id for token in taken), logprobs, finish


class RequestOutput(NamedTuple):
    """What one request gained. `finish` is set in its last output."""

    request: Request
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prefill_started: bool = False
    finish: Finish | None = None
    # All of them at once, no later than the first token.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
