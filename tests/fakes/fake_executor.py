"""A fake executor: the next token is a pure function of all tokens, read out of a paged KV store.

The store is written and read through the block tables that the plan describes, so a wrong table, a
block with two owners, or KV that was never computed or is overwritten gives wrong tokens. What the
right ones are is said by `reference_outputs`, which knows no blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from engine_svc.planning.request import FinishReason
from engine_svc.planning.step import (
    ComputedStep,
    PromptLogprobs,
    RowStart,
    RowStep,
    SampledToken,
    SamplingError,
    SamplingParameters,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

_MASK = (1 << 64) - 1


def _kv_value(previous: int, token_id: int) -> int:
    """Like KV of a layer, it depends on its token and on all before it."""
    return ((previous ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x632BE5AB) & _MASK


def _next_token(kv_values: Iterable[int], sampling: SamplingParameters, vocab_size: int) -> int:
    """Reads every value, as attention does. Without temperature the seed does not matter."""
    state = 0 if sampling.temperature < 1e-5 else sampling.seed & _MASK
    for value in kv_values:
        state = ((state ^ value) * 0x100000001B3 + 1) & _MASK
    return (state >> 20) % vocab_size


def _logprobs(token_id: int, sampling: SamplingParameters) -> TokenLogprobs | None:
    if not sampling.logprobs:
        return None
    top_token_ids = [token_id + rank for rank in range(sampling.top_logprobs)]
    return TokenLogprobs(-0.5 - token_id, top_token_ids, [-0.5 - top for top in top_token_ids])


def reference_prompt_logprobs(
    token_ids: Sequence[int], num_top: int, vocab_size: int
) -> list[TokenLogprobs]:
    """What a prompt must be told of its tokens but the first."""
    values = accumulate(token_ids, _kv_value, initial=0)
    next(values)
    return [
        _prompt_logprobs(value, following, num_top, vocab_size)
        for value, following in zip(values, token_ids[1:], strict=False)
    ]


def _prompt_logprobs(kv_value: int, following: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """Of a prompt token that comes after the one with this KV."""
    top_token_ids = [(kv_value + rank) % vocab_size for rank in range(num_top)]
    return TokenLogprobs(
        -float(kv_value % 1000 + following), top_token_ids, [-float(top) for top in top_token_ids]
    )


def reference_outputs(
    prompt_token_ids: Sequence[int], sampling: SamplingParameters, vocab_size: int
) -> tuple[list[int], FinishReason]:
    """What a request must answer, whatever else runs."""
    values: list[int] = []

    def take(token_id: int) -> None:
        values.append(_kv_value(values[-1] if values else 0, token_id))

    for token_id in prompt_token_ids:
        take(token_id)
    outputs: list[int] = []
    while True:
        token_id = _next_token(values, sampling, vocab_size)
        outputs.append(token_id)
        take(token_id)
        if token_id in sampling.eos_token_ids | sampling.stop_token_ids:
            return outputs, FinishReason.STOP
        if len(outputs) == sampling.max_tokens:
            return outputs, FinishReason.LENGTH


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    sampling: SamplingParameters
    block_table: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = field(init=False)


class FakeExecutor:
    """Executes plans on a simulated KV store and checks them against the contract of step.py.

    `before_step` is called with each plan before it is executed and may block or raise. A row that
    contains `nan_token_id` cannot be sampled.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        vocab_size: int = 64,
        max_model_len: int = 4096,
        before_step: Callable[[StepPlan], None] = lambda plan: None,
        nan_token_id: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_steps_in_flight = 1
        self.num_steps = 0
        self._before_step = before_step
        self._nan_token_id = nan_token_id
        self._kv_values: list[int | None] = [None] * (num_blocks * block_size)
        self._rows: dict[int, _Row] = {}

    def launch(self, plan: StepPlan) -> ComputedStep:
        return ComputedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        self._before_step(plan)
        self.num_steps += 1
        assert plan.steps, "an empty plan was executed"
        assert len({step.row for step in plan.steps}) == len(plan.steps), "a row occurs twice"
        for start in plan.starts:
            self._start(start)
        # All writes come first: a plan whose rows overwrite one another's KV must not pass.
        for step in plan.steps:
            self._compute(step)
        return StepResult(
            [self._sample(step) for step in plan.steps if step.samples],
            [self._score_prompt(step) for step in plan.steps if step.prompt_logprobs],
        )

    def _start(self, start: RowStart) -> None:
        row = _Row(
            list(start.token_ids), start.sampling, list(start.block_ids), start.num_prompt_tokens
        )
        row.num_computed_tokens = len(row.block_table) * self.block_size
        assert 0 < start.num_prompt_tokens <= len(row.token_ids)
        self._rows[start.row] = row

    def _compute(self, step: RowStep) -> None:
        row = self._rows[step.row]
        row.block_table += step.new_block_ids
        assert step.num_computed_tokens == row.num_computed_tokens, "tokens skipped or repeated"
        assert step.num_scheduled_tokens > 0, "a row was scheduled for nothing"
        end = step.num_computed_tokens + step.num_scheduled_tokens
        token_ids = [*row.token_ids, *step.draft_token_ids]
        assert end <= len(token_ids)
        assert step.samples == (end == len(token_ids))
        assert step.samples or not step.draft_token_ids
        for position in range(step.num_computed_tokens, end):
            previous = self._kv_values[self._slot(row, position - 1)] if position else 0
            assert previous is not None, "KV was read that nobody wrote"
            value = _kv_value(previous, token_ids[position])
            self._kv_values[self._slot(row, position)] = value
        row.num_computed_tokens = end - len(step.draft_token_ids)

    def _sample(self, step: RowStep) -> SampledToken:
        """Drafts are accepted one by one, each after the token before it was sampled."""
        row = self._rows[step.row]
        first = token = self._sample_next(step.row, row)
        if first.error:
            # As on a device, which writes what it has drawn; a step in flight goes on from there.
            row.token_ids.append(first.token_id)
        following = []
        for draft_token_id in step.draft_token_ids:
            if token.error or token.token_id != draft_token_id:
                break
            row.num_computed_tokens += 1
            token = self._sample_next(step.row, row)
            if token.error:
                row.num_computed_tokens -= 1
                break
            following.append(token)
        return first._replace(following=following)

    def _sample_next(self, row_index: int, row: _Row) -> SampledToken:
        if self._nan_token_id in row.token_ids:
            return SampledToken(row_index, 0, error=SamplingError.BAD_LOGITS)
        values = [self._kv_values[self._slot(row, i)] for i in range(row.num_computed_tokens)]
        assert None not in values, "KV was read that nobody wrote"
        token_id = _next_token(
            [value for value in values if value is not None], row.sampling, self.vocab_size
        )
        row.token_ids.append(token_id)
        return SampledToken(row_index, token_id, _logprobs(token_id, row.sampling))

    def _score_prompt(self, step: RowStep) -> PromptLogprobs:
        row = self._rows[step.row]
        assert row.sampling.prompt_logprobs
        end = min(step.num_computed_tokens + step.num_scheduled_tokens, row.num_prompt_tokens - 1)
        assert step.num_computed_tokens < end, "nothing is left to say of the prompt"
        logprobs = []
        for position in range(step.num_computed_tokens, end):
            value = self._kv_values[self._slot(row, position)]
            assert value is not None
            following, num_top = row.token_ids[position + 1], row.sampling.top_prompt_logprobs
            logprobs.append(_prompt_logprobs(value, following, num_top, self.vocab_size))
        return PromptLogprobs(step.row, logprobs)

    def _slot(self, row: _Row, position: int) -> int:
        return row.block_table[position // self.block_size] * self.block_size + (
            position % self.block_size
        )
