"""Steps that are run before the first request: the largest that can come, then some of each kind.

What lies in the blocks that they use does not matter, so all rows use the same ones.
"""

import dataclasses
from collections.abc import Iterator

from engine_svc.planning.step import RowStart, RowStep, SamplingParameters, StepPlan

_ASKING = SamplingParameters(
    max_tokens=1,
    repetition_penalty=1.5,
    top_k=2,
    logit_bias=((0, 1.0),),
    allowed_token_ids=frozenset({0, 1}),
    logprobs=True,
    top_logprobs=1,
    prompt_logprobs=True,
)
_PLAIN = SamplingParameters(max_tokens=1)
_FILTERED = dataclasses.replace(_PLAIN, top_k=2, top_p=0.5)
# Kernels are compiled for numbers that are multiples of 16, and for others.
_LENGTHS = (2, 16, 17, 128)


def largest_step(
    max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int
) -> tuple[StepPlan, int]:
    """A step in which every row computes, is asked about its prompt and samples with options; and
    how many blocks it needs."""
    num_rows = min(max_num_seqs, max_num_tokens)
    length, num_left = divmod(max_num_tokens, num_rows)
    starts, steps = [], []
    for row in range(num_rows):
        num_tokens = min(length + (row < num_left), max_model_len)
        blocks = range(-(-num_tokens // block_size))
        starts.append(RowStart(row, [0] * num_tokens, num_tokens, _ASKING, blocks))
        steps.append(RowStep(row, 0, num_tokens, (), True, num_tokens > 1))
    return StepPlan(starts, steps), len(starts[0].block_ids)


def first_steps(
    max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int
) -> Iterator[StepPlan]:
    """Prompts of several lengths, alone, then beside a row that is decoded, with options and
    without; in block 0 alone. What such steps call for the first time is compiled now."""
    for length in _LENGTHS:
        if length + 1 > min(max_num_tokens, max_model_len):
            return
        blocks = [0] * -(-(length + 1) // block_size)
        for alone, beside in ((_PLAIN, _FILTERED), (_ASKING, _ASKING)):
            start = RowStart(0, [0] * length, length, alone, blocks)
            asks = alone.prompt_logprobs
            yield StepPlan([start], [RowStep(0, 0, length, (), True, asks)])
            if max_num_seqs == 1:
                continue
            start = RowStart(1, [0] * length, length, beside, blocks)
            steps = [RowStep(0, length, 1, (), True), RowStep(1, 0, length, (), True, asks)]
            yield StepPlan([start], steps)
