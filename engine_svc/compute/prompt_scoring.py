"""Log-probabilities of prompt tokens, from what the decoder kept of the tokens before them."""

from torch import Tensor

from engine_svc.compute.model.decoder import Decoder
from engine_svc.compute.sampler import Sampler
from engine_svc.compute.step_tensors import PromptTargets
from engine_svc.planning.step import PromptLogprobs, TokenLogprobs

# Logits and what ranks them take 4 to 30 bytes for each of a vocabulary's tokens, so a long prompt
# must not have all of its own at once; with so many rows a product is as fast per row as it gets.
MAX_ROWS_AT_ONCE = 64


def score_prompts(
    decoder: Decoder, sampler: Sampler, hidden: Tensor, targets: PromptTargets
) -> tuple[PromptLogprobs, ...]:
    """hidden [K, hidden] of the step's kept tokens -> one entry per row of `targets`."""
    logprobs: list[TokenLogprobs] = []
    for begin in range(0, len(targets.num_top), MAX_ROWS_AT_ONCE):
        part = slice(begin, begin + MAX_ROWS_AT_ONCE)
        logits = decoder.logits(hidden[targets.kept_places[part]])
        logprobs += sampler.score(logits, targets.token_ids[part], targets.num_top[part])
    of_rows = iter(logprobs)
    return tuple(
        PromptLogprobs(row, [next(of_rows) for _ in range(count)])
        for row, count in zip(targets.rows, targets.counts, strict=True)
    )
