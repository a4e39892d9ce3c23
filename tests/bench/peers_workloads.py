"""What peers and we are asked alike: requests of fixed lengths, and the figures they give.

Prompts are random token ids, new in every round, so that no cache helps; only `chat` is about
caches. Answers have fixed lengths (`ignore_eos`), so that all do the same work.
"""

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.bench.http_load import LoadResult, run_load

# Ids that are ordinary words in every vocabulary.
_WORD_IDS = range(300, 8000)


class Request(NamedTuple):
    prompt: Sequence[int]
    max_tokens: int

    def body(self, model_name: str) -> dict[str, Any]:
        return {
            "model": model_name,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


# One after the other; the requests of a batch at once.
Batches = Sequence[Sequence[Request]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run; `name` is also what its goals are called by."""

    name: str
    title: str
    unit: str
    more_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` requests run at once, each of at most `context` tokens with its answer."""

    name: str
    figure: Figure
    streams: int
    context: int
    requests: Callable[[random.Random], Batches]
    value: Callable[[Batches, Sequence[LoadResult]], float]

    def run(self, port: int, model_name: str, generator: random.Random) -> float:
        """Asks the server at 127.0.0.1:`port`; returns the figure.

        RuntimeError when an answer breaks or has another length than it was asked for.
        """
        batches = self.requests(generator)
        loads = []
        for batch in batches:
            bodies = [request.body(model_name) for request in batch]
            load = asyncio.run(run_load(port, bodies, self.streams))
            asked = sum(request.max_tokens for request in batch)
            if load.num_tokens != asked:
                raise RuntimeError(f"asked for {asked} tokens in all, got {load.num_tokens}")
            loads.append(load)
        return self.value(batches, loads)


def workloads() -> list[Workload]:
    return [
        Workload(
            "single",
            Figure("single", "1 stream: 32 tokens, 128 new", "tokens/s"),
            streams=1,
            context=1024,
            requests=lambda generator: [_requests(generator, 2, 32, 128)],
            value=_new_tokens_per_second,
        ),
        Workload(
            "decode",
            Figure("decode", "1 stream: between tokens", "tokens/s"),
            streams=1,
            context=1024,
            requests=lambda generator: [_requests(generator, 2, 32, 128)],
            value=_tokens_per_second_after_the_first,
        ),
        *(
            Workload(
                f"streams{streams}",
                Figure(f"streams{streams}", f"{streams} streams: 32 tokens, 64 new", "tokens/s"),
                streams=streams,
                context=512,
                requests=lambda generator, streams=streams: [  # type: ignore[misc]
                    _requests(generator, streams, 32, 64)
                ],
                value=_new_tokens_per_second,
            )
            for streams in (16, 64)
        ),
        *(
            Workload(
                f"prefill{tokens}",
                Figure(f"prefill{tokens}", f"a prompt of {tokens:,}, 1 new", "prompt tokens/s"),
                streams=1,
                context=8192,
                requests=lambda generator, tokens=tokens, count=count: [  # type: ignore[misc]
                    _requests(generator, count, tokens, 1)
                ],
                value=_prompt_tokens_per_second,
            )
            for tokens, count in ((512, 4), (4096, 1))
        ),
        Workload(
            "ttft16",
            Figure("ttft16", "first token, 16 clients", "ms", more_is_better=False),
            streams=16,
            context=512,
            requests=_closed_loop,
            value=lambda batches, loads: _median_first_token_ms(loads),
        ),
        Workload(
            "chat",
            Figure("chat", "8 chats with one system prompt of 512", "tokens/s"),
            streams=8,
            context=1024,
            requests=_chats,
            value=_new_tokens_per_second,
        ),
    ]


def _words(generator: random.Random, count: int) -> list[int]:
    return [generator.choice(_WORD_IDS) for _ in range(count)]


def _requests(
    generator: random.Random, count: int, prompt_tokens: int, max_tokens: int
) -> list[Request]:
    return [Request(_words(generator, prompt_tokens), max_tokens) for _ in range(count)]


def _closed_loop(generator: random.Random) -> Batches:
    """32 requests of 128 tokens, whose answers end at different times: most arrive amid others."""
    return [[Request(_words(generator, 128), generator.randrange(16, 49)) for _ in range(32)]]


def _chats(generator: random.Random) -> Batches:
    """3 turns of 8 users. What stands for answers in later turns is random too, so that the text
    does not depend on who answers."""
    system = _words(generator, 512)
    histories = [system + _words(generator, 32) for _ in range(8)]
    turns = []
    for _ in range(3):
        turns.append([Request(list(history), 32) for history in histories])
        histories = [history + _words(generator, 64) for history in histories]
    return turns


def _new_tokens_per_second(batches: Batches, loads: Sequence[LoadResult]) -> float:
    return sum(load.num_tokens for load in loads) / sum(load.seconds for load in loads)


def _tokens_per_second_after_the_first(batches: Batches, loads: Sequence[LoadResult]) -> float:
    streams = [stream for load in loads for stream in load.streams]
    seconds = sum(stream.total_seconds - stream.first_token_seconds for stream in streams)
    return sum(stream.num_tokens - 1 for stream in streams) / seconds


def _prompt_tokens_per_second(batches: Batches, loads: Sequence[LoadResult]) -> float:
    num_tokens = sum(len(request.prompt) for batch in batches for request in batch)
    return num_tokens / sum(load.seconds for load in loads)


def _median_first_token_ms(loads: Sequence[LoadResult]) -> float:
    streams = [stream for load in loads for stream in load.streams]
    return 1e3 * statistics.median(stream.first_token_seconds for stream in streams)
