"""How answers look: what each endpoint's form says, and the JSON that several forms share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from gateway.generation_fields import GenerationFields
from gateway.records import FINISH_REASONS
from gateway.sse import DONE, PING, error_event
from gateway.usage import Usage
from protos.detok.v1 import detok_pb2
from protos.wire.errors import TokenlineError


@dataclass(slots=True)
class Choice:
    """One choice of a whole answer, as it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[detok_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[detok_pb2.TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def mean_logprob(self) -> float:
        """Over the tokens that are shown; the least there is where none is."""
        logprobs = [entry.token.logprob for entry in self.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else -math.inf

    def add(self, output: detok_pb2.Output) -> None:
        self.texts.append(output.text)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.finish_reason = finish_reason(output)


class GrowingChoice(Protocol):
    """One choice of a whole answer, as it grows."""

    def add(self, output: detok_pb2.Output) -> None: ...


ChoiceT = TypeVar("ChoiceT", bound=GrowingChoice)


class AnswerForm(ABC, Generic[ChoiceT]):
    """How an endpoint writes one answer, streamed or whole.

    It depends on nothing but the call and the outputs: any gateway writes the same. `end_of_stream`
    ends every stream; `ping` is sent while there is nothing to say. has_event_ids: events have ids,
    from which a client can go on; an output makes one event then, or none.
    """

    has_event_ids: ClassVar[bool] = False
    end_of_stream: ClassVar[bytes] = DONE
    ping: ClassVar[bytes] = PING

    def begin(self, *, in_reasoning: bool) -> None:
        """Called once, before all else. in_reasoning: the prompt ends where thoughts begin."""

    @abstractmethod
    def new_choice(self) -> ChoiceT:
        """The next choice of a whole answer."""

    @abstractmethod
    def output_events(self, index: int, output: detok_pb2.Output, usage: Usage) -> bytes:
        """Events for what choice `index` gained; empty when there is nothing to say.

        `usage` is the whole request's up to and with this output.
        """

    @abstractmethod
    async def last_events(self, usage: Usage) -> bytes:
        """The events after all outputs; `end_of_stream` follows them."""

    def failure_events(self, error: TokenlineError) -> bytes:
        """The events of a stream that fails."""
        return error_event(error)

    @abstractmethod
    async def whole(self, choices: Sequence[ChoiceT], usage: Usage) -> bytes:
        """The whole answer as JSON."""


def usage_json(usage: Usage) -> dict[str, Any]:
    """The `usage` object of both endpoints."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChunkTail:
    """What ends every chunk after its choice: as bytes, since a chunk is a concatenation."""

    def __init__(self, body: GenerationFields) -> None:
        self._has_usage = body.has_usage_in_chunks
        self._constant = b'}],"usage":null}\n\n' if body.include_usage else b"}]}\n\n"

    def __call__(self, usage: Usage) -> bytes:
        """`usage` is the whole request's up to now."""
        if not self._has_usage:
            return self._constant
        return b'}],"usage":' + msgspec.json.encode(usage_json(usage)) + b"}\n\n"


def prompt_logprobs_json(
    tokens: Sequence[detok_pb2.TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token first; null for the first.

    A token that is not among the likeliest that were computed has the rank null.
    """
    return [None, *(_by_token_id(entry, num_top) for entry in tokens[1:])]


def _by_token_id(entry: detok_pb2.TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranks = {token.token_id: rank for rank, token in enumerate(entry.top, start=1)}
    return {
        str(token.token_id): {
            "logprob": token.logprob,
            "rank": ranks.get(token.token_id),
            "decoded_token": token.text,
        }
        for token in (entry.token, *entry.top[:num_top])
    }


def finish_reason(output: detok_pb2.Output) -> str | None:
    """The API's word for how the sequence ended; None while it has not.

    An error is no such end: it is told by an event of its own.
    """
    return FINISH_REASONS[output.finish.reason] if output.HasField("finish") else None
