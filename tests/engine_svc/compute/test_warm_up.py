"""The steps that run before the first request keep every limit, and reach what they are for."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.warm_up import first_steps, largest_step
from tests.fakes.device_decoding import load_device_executor
from tests.fakes.tiny_models import write_tiny_llama

LIMITS = {
    "max_num_seqs": st.integers(1, 40),
    "max_num_tokens": st.integers(1, 200),
    "max_model_len": st.integers(1, 200),
    "block_size": st.integers(1, 20),
}


@given(**LIMITS)
def test_the_largest_step_fills_all_limits_and_no_more(
    max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int
) -> None:
    plan, num_blocks = largest_step(max_num_seqs, max_num_tokens, max_model_len, block_size)
    num_rows = min(max_num_seqs, max_num_tokens)
    assert [step.row for step in plan.steps] == list(range(num_rows))
    assert plan.num_scheduled_tokens == min(max_num_tokens, num_rows * max_model_len)
    assert all(step.samples and not step.new_block_ids for step in plan.steps)
    for start, step in zip(plan.starts, plan.steps, strict=True):
        assert len(start.token_ids) == step.num_scheduled_tokens <= max_model_len
        assert step.num_scheduled_tokens <= len(start.block_ids) * block_size
        assert max(start.block_ids) < num_blocks


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
    plan, _ = largest_step(8, 512, executor.max_model_len, 16)
    result = executor.execute(plan)
    assert [token.error for token in result.sampled] == [None] * 8
    assert [len(entry.logprobs) for entry in result.prompt_logprobs] == [63] * 8
