"""Log-probabilities of prompt tokens, from what the decoder kept of the tokens before them."""

import torch

from engine_svc.compute.model_runner import ModelRunner
from engine_svc.compute.persistent_batch import PromptTargets
from engine_svc.compute.sampler import Sampler
from engine_svc.planning.step import PromptLogprobs, TokenLogprobs

# Logits and what ranks them take 4 to 30 bytes for each of a vocabulary's tokens, so a long prompt
# does not have all of its own at once; with so many rows a product is as fast per row as it gets.
MAX_ROWS_AT_ONCE = 64


def score_prompts(
    runner: ModelRunner, sampler: Sampler, targets: PromptTargets
) -> tuple[PromptLogprobs, ...]:
    """One entry per row of `targets`, of the step that `runner` has computed."""
    logprobs: list[TokenLogprobs] = []
    for begin in range(0, len(targets.num_top), runner.max_rows):
        part = slice(begin, begin + runner.max_rows)
        logits = runner.logits(targets.kept_places[part])
        token_ids = torch.from_numpy(targets.token_ids[part])
        logprobs += sampler.score(logits, token_ids, targets.num_top[part])
    of_rows = iter(logprobs)
    return tuple(
        PromptLogprobs(row, [next(of_rows) for _ in range(count)])
        for row, count in zip(targets.rows, targets.counts, strict=True)
    )
