"""The steps that run before the first request keep every limit, and reach what they are for."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.warm_up import first_steps, largest_steps
from engine_svc.planning.step import StepPlan
from tests.fakes.device_decoding import load_device_executor
from tests.fakes.tiny_models import write_tiny_llama

LIMITS = {
    "max_num_seqs": st.integers(1, 40),
    "max_num_tokens": st.integers(1, 200),
    "max_model_len": st.integers(1, 200),
    "block_size": st.integers(1, 20),
}


@given(**LIMITS)
def test_the_largest_steps_fill_all_limits_and_no_more(
    max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int
) -> None:
    plans, num_blocks = largest_steps(max_num_seqs, max_num_tokens, max_model_len, block_size)
    num_rows = min(max_num_seqs, max_num_tokens)
    largest = plans[0]
    assert [step.row for step in largest.steps] == list(range(num_rows))
    assert largest.num_scheduled_tokens == min(max_num_tokens, num_rows * max_model_len)
    assert all(step.samples for step in largest.steps)
    # No step is asked about more tokens.
    most_asked = min(max_num_tokens, num_rows * (max_model_len - 1))
    assert most_asked == max(map(num_asked, plans))
    for plan in plans:
        assert 0 < plan.num_scheduled_tokens <= max_num_tokens
        for start, step in zip(plan.starts, plan.steps, strict=True):
            assert not step.new_block_ids
            assert len(start.token_ids) == step.num_scheduled_tokens + (not step.samples)
            assert len(start.token_ids) <= max_model_len
            assert step.num_scheduled_tokens <= len(start.block_ids) * block_size
            assert max(start.block_ids) < num_blocks


def num_asked(plan: StepPlan) -> int:
    """Tokens of prompts that a step gives log-probabilities of."""
    asked = [step for step in plan.steps if step.prompt_logprobs]
    return sum(step.num_scheduled_tokens - step.samples for step in asked)


@given(**LIMITS)
def test_the_first_steps_keep_the_limits_in_one_block(
    max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int
) -> None:
    lens: dict[int, int] = {}
    for plan in first_steps(max_num_seqs, max_num_tokens, max_model_len, block_size):
        assert 0 < plan.num_scheduled_tokens <= max_num_tokens
        for start in plan.starts:
            assert set(start.block_ids) == {0}
            assert len(start.block_ids) <= -(-max_model_len // block_size)
            lens[start.row] = 0
        for step in plan.steps:
            assert step.row < max_num_seqs
            assert step.num_computed_tokens == lens[step.row]
            lens[step.row] += step.num_scheduled_tokens
            assert lens[step.row] <= max_model_len


def test_an_executor_can_run_them_and_then_answer(tmp_path: Path) -> None:
    executor = load_device_executor(write_tiny_llama(tmp_path))
    executor.warm_up(ExecutorConfig(8, 512))
    plans, _ = largest_steps(8, 512, executor.max_model_len, 16)
    result = executor.execute(plans[0])
    assert [token.error for token in result.sampled] == [None] * 8
    assert [len(entry.logprobs) for entry in result.prompt_logprobs] == [63] * 8
