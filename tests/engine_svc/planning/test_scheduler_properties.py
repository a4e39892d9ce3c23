"""Random workloads: the invariants of the scheduler hold in every step, and answers never change.

The fake executor reads tokens back through the block tables, so "equal to the reference" says that
chunking, caching, preemption and aborts lose and mix up nothing.
"""

from collections import Counter
from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine_svc.planning.errors import RequestRefused
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import FinishReason
from engine_svc.planning.step import SamplingParameters, StepPlan, TokenLogprobs
from tests.fakes.drafters import KnowingDrafter
from tests.fakes.fake_executor import (
    FakeExecutor,
    reference_outputs,
    reference_prompt_logprobs,
)
from tests.fakes.scheduler_driver import SchedulerDriver

VOCAB_SIZE = 8
EOS, STOP = 6, 7
# Prompts are heads of this with a few tokens of their own, so that many share blocks.
SHARED_TEXT = [number % 5 for number in range(1, 60)]
LAST_ARRIVAL, LAST_EVENT = 12, 40


@dataclass(frozen=True)
class Arrival:
    """A request of a workload. `abort_after` counts steps from its arrival."""

    step: int
    prompt_token_ids: list[int]
    sampling: SamplingParameters
    priority: int
    cache_salt: str
    abort_after: int | None
    abort_while_executing: bool
    num_outputs_before: int


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    head = SHARED_TEXT[: draw(st.integers(0, 16))]
    tail = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    sampling = SamplingParameters(
        max_tokens=draw(st.integers(1, 24)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        eos_token_ids=draw(st.sampled_from([frozenset(), frozenset({EOS})])),
        stop_token_ids=draw(st.sampled_from([frozenset(), frozenset({STOP})])),
        prompt_logprobs=draw(st.sampled_from([False, False, True])),
        top_prompt_logprobs=2,
    )
    return Arrival(
        step=draw(st.integers(0, LAST_ARRIVAL)),
        prompt_token_ids=head + tail,
        sampling=sampling,
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from(["", "", "salt"])),
        abort_after=draw(st.none() | st.none() | st.integers(0, LAST_EVENT - LAST_ARRIVAL)),
        abort_while_executing=draw(st.booleans()),
        num_outputs_before=draw(st.sampled_from([0, 0, 0, 3])),
    )


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    max_num_seqs = draw(st.sampled_from([1, 3, 6, 8]))
    block_size = draw(st.sampled_from([1, 2, 4, 7]))
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)),
        max_model_len=draw(st.sampled_from([30, 60, 60])),
        max_waiting=draw(st.sampled_from([2, 100, 100, 100])),
        max_draft_tokens=draw(st.sampled_from([0, 3, 8])),
        # From too small for most requests to enough for all at once.
        num_blocks=draw(st.sampled_from([20, 40, 40, 50, 60, 150])) // block_size,
        block_size=block_size,
        prefix_cache=draw(st.booleans()),
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

    def check(self, plan: StepPlan) -> None:
        """Called between schedule and commit."""
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

    def check_idle(self) -> None:
        load = self.scheduler.load
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert load.num_free_blocks == self.config.num_blocks


def run_workload(driver: CheckedDriver, workload: list[Arrival]) -> None:
    """Runs to the end within a number of steps that starving or thrashing would exceed."""
    bound = (
        LAST_EVENT
        + 2
        + 10
        * sum(len(arrival.prompt_token_ids) + arrival.sampling.max_tokens for arrival in workload)
    )
    for step in range(bound):
        for key, arrival in enumerate(workload):
            if arrival.step == step:
                submit(driver, key, arrival)
        leaving = [
            key
            for key, arrival in enumerate(workload)
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step
        ]
        for key in leaving:
            if not workload[key].abort_while_executing or not driver.scheduler.has_requests:
                driver.abort(key)
        if driver.scheduler.has_requests:

            def while_executing(leaving: list[int] = leaving) -> None:
                driver.check(driver.plans[-1])
                for key in leaving:
                    driver.abort(key)

            driver.step(while_executing)
        elif step > LAST_EVENT:
            return
    raise AssertionError(f"requests are still there after {bound} steps")


def submit(driver: CheckedDriver, key: int, arrival: Arrival) -> None:
    outputs, _ = reference_outputs(arrival.prompt_token_ids, arrival.sampling, VOCAB_SIZE)
    driver.drafter.outputs[key] = outputs
    try:
        driver.add(
            key,
            arrival.prompt_token_ids,
            arrival.sampling,
            output_token_ids=outputs[: arrival.num_outputs_before],
            priority=arrival.priority,
            cache_salt=arrival.cache_salt,
        )
    except RequestRefused:
        event("refused")


def check_answers(driver: CheckedDriver, workload: list[Arrival]) -> None:
    for key, request in driver.requests.items():
        arrival, received = workload[key], driver.received[key]
        expected, reason = reference_outputs(arrival.prompt_token_ids, arrival.sampling, VOCAB_SIZE)
        assert request.finish is not None
        outputs = list(request.output_token_ids)
        if request.finish.reason is FinishReason.CANCELLED:
            assert outputs == expected[: len(outputs)]
        else:
            assert (outputs, request.finish.reason) == (expected, reason)
        before = min(arrival.num_outputs_before, len(expected))
        assert received.token_ids == outputs[before:]
        assert received.num_starts <= 1
        if received.token_ids:
            assert received.num_starts == 1
            assert received.prompt_logprobs == expected_prompt_logprobs(arrival)


def expected_prompt_logprobs(arrival: Arrival) -> list[TokenLogprobs]:
    if not arrival.sampling.prompt_logprobs:
        return []
    return reference_prompt_logprobs(arrival.prompt_token_ids, 2, VOCAB_SIZE)


@settings(max_examples=200, deadline=None)
@given(configs(), st.lists(arrivals(), min_size=1, max_size=16))
def test_limits_hold_blocks_have_one_owner_and_every_request_ends_with_the_right_answer(
    config: SchedulerConfig, workload: list[Arrival]
) -> None:
    check_workload(config, workload)


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        SchedulerConfig,
        max_num_seqs=st.just(8),
        max_num_batched_tokens=st.integers(8, 40),
        max_model_len=st.just(48),
        max_waiting=st.just(100),
        num_blocks=st.just(12),
        block_size=st.just(4),
        prefix_cache=st.booleans(),
        max_draft_tokens=st.sampled_from([0, 5]),
    ),
    st.lists(arrivals(), min_size=8, max_size=16),
)
def test_the_same_holds_when_many_requests_crowd_a_small_pool(
    config: SchedulerConfig, workload: list[Arrival]
) -> None:
    check_workload(config, workload)


def check_workload(config: SchedulerConfig, workload: list[Arrival]) -> None:
    driver = CheckedDriver(config)
    run_workload(driver, workload)
    driver.check_idle()
    check_answers(driver, workload)
    load = driver.scheduler.load
    event("preempted" if load.num_preemptions else "not preempted")
    event("cache hit" if load.num_prefix_cache_hit_tokens else "no cache hit")
    event("drafts accepted" if load.num_accepted_draft_tokens else "no drafts accepted")
    assert load.num_accepted_draft_tokens <= load.num_draft_tokens
