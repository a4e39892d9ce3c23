"""Random workloads: the invariants of the scheduler hold in every step, and answers never change.

The fake executor reads tokens back through the block tables, so "equal to the reference" says that
chunking, caching, preemption and aborts lose and mix up nothing.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.step import StepPlan
from tests.fakes.drafters import KnowingDrafter
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.scheduler_driver import SchedulerDriver
from tests.fakes.scheduler_workloads import (
    VOCAB_SIZE,
    Arrival,
    arrivals,
    check_answers,
    check_idle,
    configs,
    crowded_configs,
    run_workload,
)


class CheckedDriver(SchedulerDriver):
    """Checks the limits and the ownership of blocks around every step."""

    def __init__(self, config: SchedulerConfig) -> None:
        executor = FakeExecutor(
            num_blocks=config.num_blocks, block_size=config.block_size, vocab_size=VOCAB_SIZE
        )
        self.drafter = KnowingDrafter(VOCAB_SIZE, config.max_draft_tokens)
        super().__init__(config, executor.execute, self.drafter)
        self.config = config

    def will_answer(self, key: Hashable, token_ids: Sequence[int]) -> None:
        self.drafter.outputs[key] = token_ids

    def check(self, plan: StepPlan) -> None:
        config = self.config
        assert len(plan.steps) <= config.max_num_seqs
        assert 0 < plan.num_scheduled_tokens <= config.max_num_batched_tokens
        assert all(0 <= step.row < config.max_num_seqs for step in plan.steps)
        num_sampled = sum(step.samples + len(step.draft_token_ids) for step in plan.steps)
        assert num_sampled <= config.max_num_sampled_tokens
        by_row = {r.row: r for r in self.requests.values() if r.row is not None}
        first = min(by_row.values(), key=lambda request: request.order)
        assert first.row in {step.row for step in plan.steps}, "the first in order stands still"
        holders = Counter(b for request in by_row.values() for b in set(request.block_ids))
        assert self.scheduler.load.num_free_blocks == config.num_blocks - len(holders)
        for step in plan.steps:
            request = by_row[step.row]
            assert len(request.block_ids) == len(set(request.block_ids))
            end = step.num_computed_tokens + step.num_scheduled_tokens
            num_drafts = len(step.draft_token_ids)
            assert num_drafts <= config.max_draft_tokens
            assert end - num_drafts <= request.num_tokens <= config.max_model_len
            assert not num_drafts or end < request.max_num_tokens
            begin_block = step.num_computed_tokens // config.block_size
            for block_id in request.block_ids[begin_block:]:
                assert holders[block_id] == 1, "a block that is written has a second holder"


@settings(max_examples=200, deadline=None)
@given(configs(), st.lists(arrivals(), min_size=1, max_size=16))
def test_limits_hold_blocks_have_one_owner_and_every_request_ends_with_the_right_answer(
    config: SchedulerConfig, workload: list[Arrival]
) -> None:
    check_workload(config, workload)


@settings(max_examples=100, deadline=None)
@given(crowded_configs(), st.lists(arrivals(), min_size=8, max_size=16))
def test_the_same_holds_when_many_requests_crowd_a_small_pool(
    config: SchedulerConfig, workload: list[Arrival]
) -> None:
    check_workload(config, workload)


def check_workload(config: SchedulerConfig, workload: list[Arrival]) -> None:
    driver = CheckedDriver(config)
    run_workload(driver, workload)
    check_idle(driver, config.num_blocks)
    check_answers(driver, workload)
    load = driver.scheduler.load
    event("preempted" if load.num_preemptions else "not preempted")
    event("cache hit" if load.num_prefix_cache_hit_tokens else "no cache hit")
    event("drafts accepted" if load.num_accepted_draft_tokens else "no drafts accepted")
    assert load.num_accepted_draft_tokens <= load.num_draft_tokens
