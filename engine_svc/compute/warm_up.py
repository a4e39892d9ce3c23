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
# Of products' tiles, which are powers of two.
_TILE_ROWS = (8, 16, 32, 64, 128)


def largest_steps(
    max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int
) -> tuple[list[StepPlan], int]:
    """Steps than which no later one takes more memory for anything; and how many blocks they need.

    In the first every row computes, is asked about its prompt and samples with options; in the next
    none samples, so that more tokens are asked about. What products keep of parts of their columns
    is most where they have as many rows as a tile.
    """
    sizes = [(max_num_tokens, True), (max_num_tokens, False)]
    sizes += [(size, True) for size in _TILE_ROWS if size < max_num_tokens]
    plans = [
        _asking_step(num_tokens, min(max_num_seqs, num_tokens), max_model_len, block_size, samples)
        for num_tokens, samples in sizes
    ]
    num_blocks = max(len(start.block_ids) for plan in plans for start in plan.starts)
    return [plan for plan in plans if plan.steps], num_blocks


def _asking_step(
    num_tokens: int, num_rows: int, max_model_len: int, block_size: int, samples: bool
) -> StepPlan:
    """A step of all rows alike; a row that does not sample has a token more to compute later."""
    length, num_left = divmod(num_tokens, num_rows)
    num_later = int(not samples)
    starts, steps = [], []
    for row in range(num_rows):
        num_scheduled = min(length + (row < num_left), max_model_len - num_later)
        if not num_scheduled:
            break
        prompt = [0] * (num_scheduled + num_later)
        blocks = range(-(-num_scheduled // block_size))
        starts.append(RowStart(row, prompt, len(prompt), _ASKING, blocks))
        steps.append(RowStep(row, 0, num_scheduled, (), samples, len(prompt) > 1))
    return StepPlan(starts, steps)


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
