"""Speculation: how much faster answers that quote their prompt become, and what it costs others.

Each workload runs with guesses and without, in turns, on one engine in this process; prompts are in
its prefix cache. Prints the medians of tokens/s from when all requests of a batch have their first
token, and their ratio, which holds still where single rounds, of a second or less, do not. Ends
with status 1 when a goal is missed or an answer differs.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from compose.directories import models_directory
from compose.model_store import DEFAULT_MODEL, ModelStore
from engine_svc.__main__ import load, scheduler_config
from engine_svc.planning.ngram_drafter import NgramDrafter
from engine_svc.planning.request import Request
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.speculation import Draft
from engine_svc.planning.step import SamplingParameters
from engine_svc.settings import Settings
from tokenizer_svc.tokenizer_source import load_tokenizer_files

CONSOLE = Console()
TEXT = Path(__file__).parent / "data" / "alice.txt"
PASSAGE_CHARACTERS: Final = 1500
TASK: Final = "Summarise this text in one sentence. Then quote all of it, word for word."
# How the answer begins, so that a small model too does as it is told; then the first words follow.
BEGINNING: Final = "It tells of Alice, who wonders. Here is the text, word for word:\n\n"
NUM_FIRST_WORDS: Final = 8
LEAST_GAIN: Final = 2.5
MOST_LOSS: Final = 0.97


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts` run at once; `goal` is the least ratio of tokens/s with guesses to without."""

    name: str
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float
    goal: float


class SwitchedDrafter:
    """The engine's own drafter, as long as it is on; it learns meanwhile."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.is_on = True
        self._drafter = NgramDrafter(max_draft_tokens)

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        return self._drafter.draft(requests, limit) if self.is_on else []

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._drafter.observe(num_tokens, seconds)


class Engine:
    """Scheduler and executor in a plain loop."""

    def __init__(self, settings: Settings) -> None:
        self._executor = load(settings)
        config = scheduler_config(settings, self._executor)
        self.drafter = SwitchedDrafter(config.max_draft_tokens)
        self._scheduler = Scheduler(config, self.drafter)

    @property
    def num_drafts(self) -> tuple[int, int]:
        """Drafted and accepted tokens so far."""
        load = self._scheduler.load
        return load.num_draft_tokens, load.num_accepted_draft_tokens

    def run(self, workload: Workload) -> tuple[float, list[list[int]]]:
        """Tokens/s once all requests have begun to answer, and the answers."""
        requests = [
            Request(
                number,
                list(prompt),
                len(prompt),
                SamplingParameters(workload.max_tokens, workload.temperature, seed=number),
            )
            for number, prompt in enumerate(workload.prompts)
        ]
        for request in requests:
            self._scheduler.add(request)
        began, num_before = 0.0, 0
        while self._scheduler.has_requests:
            plan = self._scheduler.schedule()
            started = time.perf_counter()
            result = self._executor.execute(plan)
            self._scheduler.commit(plan, result, time.perf_counter() - started)
            if not began and all(request.output_token_ids for request in requests):
                began = time.perf_counter()
                num_before = sum(len(request.output_token_ids) for request in requests)
        seconds = time.perf_counter() - began
        answers = [list(request.output_token_ids) for request in requests]
        return (sum(map(len, answers)) - num_before) / seconds, answers


def add_command(commands: Any) -> None:
    parser = commands.add_parser("speculation", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL.name, help="a name, GGUF file or HF directory"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    model = ModelStore(models_directory(), CONSOLE).resolve(arguments.model)
    engine = Engine(Settings(model=model, kv_memory=1 << 30))
    table = Table("workload", "off", "ngram", "ratio", "by round", "goal", "accepted / drafted")
    is_missed = False
    for workload in workloads(model, arguments.max_tokens):
        if arguments.only not in workload.name:
            continue
        rates, drafts = _alternate(engine, workload, arguments.rounds)
        off, on = (statistics.median(rate[mode] for rate in rates) for mode in (0, 1))
        ratios = [rate_on / rate_off for rate_off, rate_on in rates]
        is_missed |= on / off < workload.goal
        table.add_row(
            workload.name,
            f"{off:.1f}",
            f"{on:.1f}",
            f"[bold]{on / off:.2f}[/bold]",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{workload.goal:.2f}",
            f"{drafts[1]} / {drafts[0]}",
        )
    CONSOLE.print(table)
    if is_missed:
        raise SystemExit("a goal is missed")


def _alternate(
    engine: Engine, workload: Workload, rounds: int
) -> tuple[list[tuple[float, float]], tuple[int, int]]:
    """(tokens/s without, with) by round, and what was drafted and accepted."""
    engine.run(workload)  # fills the prefix cache
    drafted, accepted = engine.num_drafts
    rates = []
    for number in range(rounds):
        found = {}
        for is_on in (number % 2 == 0, number % 2 == 1):
            engine.drafter.is_on = is_on
            found[is_on] = engine.run(workload)
        engine.drafter.is_on = True
        if found[True][1] != found[False][1]:
            raise SystemExit(f"{workload.name}: an answer differs with speculation")
        rates.append((found[False][0], found[True][0]))
    drafted_after, accepted_after = engine.num_drafts
    return rates, (drafted_after - drafted, accepted_after - accepted)


def workloads(model: Path, max_tokens: int) -> Iterator[Workload]:
    tokenizer = load_tokenizer_files(model).tokenizer

    def chat(content: str, beginning: str = "") -> list[int]:
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n{beginning}"
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    text = TEXT.read_text(encoding="utf-8")
    passages = [
        text[begin : begin + PASSAGE_CHARACTERS].partition(". ")[2]
        for begin in range(2000, len(text), PASSAGE_CHARACTERS)
    ]
    quotes = [
        chat(f"{TASK}\n\n{passage}", BEGINNING + " ".join(passage.split()[:NUM_FIRST_WORDS]))
        for passage in passages
    ]
    yield Workload("quote, 1 stream", quotes[:1], max_tokens, 0.0, LEAST_GAIN)
    yield Workload("quote, 4 streams", quotes[1:5], max_tokens, 0.0, 1.0)
    yield Workload("quote, 16 streams", quotes[5:21], max_tokens, 0.0, 1.0)
    letters = [chat(f"Write a letter about the number {number}.") for number in range(16)]
    yield Workload("letter, 1 stream", letters[:1], max_tokens, 0.8, MOST_LOSS)
    generator = random.Random(1)
    noise = [[generator.randrange(300, 8000) for _ in range(128)] for _ in range(16)]
    for streams in (1, 4, 16):
        name = f"random, {streams} stream{'s' * (streams > 1)}"
        yield Workload(name, noise[:streams], max_tokens, 1.0, MOST_LOSS)
