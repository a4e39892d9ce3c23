"""The stages of sampling one token in plain Python: the exact distribution, step by step.

Shares no code with the engine, and computes in float64. `slack` moves every threshold a little, so
that a test can tell whether rounding could decide what is kept.
"""

import math
from collections.abc import Sequence

from engine_svc.planning.step import SamplingParameters

IMPOSSIBLE = -math.inf
GREEDY_TEMPERATURE = 1e-5


def edited_logits(
    logits: Sequence[float],
    prompt: Sequence[int],
    outputs: Sequence[int],
    sampling: SamplingParameters,
) -> list[float]:
    """Allowed mask, then biases and bans, then the repetition, presence, frequency penalties."""
    edited = [float(logit) for logit in logits]
    if sampling.allowed_token_ids:
        for token in range(len(edited)):
            if token not in sampling.allowed_token_ids:
                edited[token] = IMPOSSIBLE
    for token, bias in sampling.logit_bias:
        edited[token] += bias
    for token in banned_tokens(outputs, sampling):
        if token < len(edited):
            edited[token] = IMPOSSIBLE
    for token in {*prompt, *outputs}:
        if edited[token] > 0:
            edited[token] /= sampling.repetition_penalty
        else:
            edited[token] *= sampling.repetition_penalty
    for token in set(outputs):
        edited[token] -= sampling.presence_penalty
        edited[token] -= sampling.frequency_penalty * list(outputs).count(token)
    return edited


def banned_tokens(outputs: Sequence[int], sampling: SamplingParameters) -> set[int]:
    banned = set()
    for *beginning, last in sampling.bad_words:
        if list(outputs[len(outputs) - len(beginning) :]) == beginning:
            banned.add(last)
    if len(outputs) < sampling.min_tokens:
        banned |= sampling.eos_token_ids | sampling.stop_token_ids
    return banned


def kept_scores(
    edited: Sequence[float], sampling: SamplingParameters, slack: float = 0.0
) -> dict[int, float]:
    """The tokens that may come, each with its logit over the temperature."""
    if sampling.temperature < GREEDY_TEMPERATURE or sampling.top_p <= 0:
        return {list(edited).index(max(edited)): 0.0}
    scores = {
        token: logit / sampling.temperature
        for token, logit in enumerate(edited)
        if logit > IMPOSSIBLE
    }
    highest = max(scores.values())
    # Relative to the likeliest token's probability.
    weights = {token: math.exp(score - highest) for token, score in scores.items()}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    ranked = [token for token in ranked if weights[token] >= sampling.min_p * (1 + slack)]
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1:
        wanted = (sampling.top_p + slack) * sum(weights[token] for token in ranked)
        kept, mass = 0, 0.0
        while kept < len(ranked) and mass < wanted:
            mass += weights[ranked[kept]]
            kept += 1
        ranked = ranked[:kept]
    return {token: scores[token] for token in ranked}


def exact_distribution(
    logits: Sequence[float],
    prompt: Sequence[int],
    outputs: Sequence[int],
    sampling: SamplingParameters,
) -> list[float]:
    """The probability of each token to be the next."""
    scores = kept_scores(edited_logits(logits, prompt, outputs, sampling), sampling)
    highest = max(scores.values())
    weights = {token: math.exp(score - highest) for token, score in scores.items()}
    total = sum(weights.values())
    return [weights.get(token, 0.0) / total for token in range(len(logits))]
