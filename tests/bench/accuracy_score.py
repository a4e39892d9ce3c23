"""The likelihood of a fixed text under the engine as served, and under the float32 reference."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.__main__ import load, scheduler_config
from engine_svc.planning.request import Request
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.step import SamplingParameters
from engine_svc.settings import Settings
from protos.wire.settings import load_settings
from tests.bench.accuracy_reference import ReferenceModel
from tokenizer_svc.tokenizer_source import load_tokenizer_files

TEXT = Path(__file__).parent / "data" / "alice.txt"
# The goal: the engine's perplexity is within 1 % of that of the same weights in float32.
MAX_PERPLEXITY_RATIO = 1.01


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Natural-log probabilities of the same tokens, float32 [num_tokens] each."""

    engine: Tensor
    reference: Tensor

    @property
    def engine_perplexity(self) -> float:
        return math.exp(-float(self.engine.double().mean()))

    @property
    def reference_perplexity(self) -> float:
        return math.exp(-float(self.reference.double().mean()))

    @property
    def ratio(self) -> float:
        return self.engine_perplexity / self.reference_perplexity

    @property
    def holds(self) -> bool:
        return 1 / MAX_PERPLEXITY_RATIO <= self.ratio <= MAX_PERPLEXITY_RATIO

    @property
    def mean_difference(self) -> float:
        return float((self.engine - self.reference).abs().mean())


def text_windows(model: Path, num_tokens: int, window: int) -> list[list[int]]:
    """The beginning of the text as windows of `window` ids; about `num_tokens` in all, 0 for all.

    Each window is scored alone, so that what it costs does not depend on the text's length.
    """
    ids = load_tokenizer_files(model).tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    count = len(ids) // window
    if num_tokens:
        count = min(count, -(-num_tokens // window))
    return [ids[index * window : (index + 1) * window] for index in range(count)]


def engine_settings(model: Path, window: int, flags: Sequence[str] = ()) -> Settings:
    """The engine's defaults and `flags`, with room for some windows."""
    own = ["--model", str(model), "--max-model-len", str(window + 1), "--max-num-seqs", "8"]
    own += ["--max-num-batched-tokens", "512"]
    if "--kv-memory" not in flags:
        own += ["--kv-memory", "256MiB"]
    return load_settings(Settings, "engine_svc", [*own, *flags], {})


def engine_logprobs(settings: Settings, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """[T - 1] for each window: what the engine answers to who asks for `prompt_logprobs`."""
    executor = load(settings)
    config = scheduler_config(settings, executor)
    for window in windows:
        scheduler = Scheduler(config)
        sampling = SamplingParameters(max_tokens=1, temperature=0.0, prompt_logprobs=True)
        scheduler.add(Request(0, list(window), len(window), sampling))
        logprobs: list[float] = []
        while scheduler.has_requests:
            plan = scheduler.schedule()
            for output in scheduler.commit(plan, executor.execute(plan)):
                logprobs += [token.logprob for token in output.prompt_logprobs]
        yield torch.tensor(logprobs)


def measure(
    settings: Settings, windows: Sequence[Sequence[int]], reference: Sequence[Tensor] | None = None
) -> Accuracy:
    """Scores the windows with both, or with the engine alone where `reference` is there already."""
    if reference is None:
        reference = reference_logprobs(settings.model, windows)
    engine = list(engine_logprobs(settings, windows))
    return Accuracy(torch.cat(engine), torch.cat(list(reference)))


def reference_logprobs(model: Path, windows: Sequence[Sequence[int]]) -> list[Tensor]:
    """[T - 1] for each window."""
    scored = ReferenceModel(model)
    return [scored.logprobs(window) for window in windows]
