"""Random workloads for a scheduler: requests that come, are aborted, and have one right answer."""

from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st

from engine_svc.planning.errors import RequestRefused
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import FinishReason
from engine_svc.planning.step import Grammar, GrammarForm, SamplingParameters, TokenLogprobs
from tests.fakes.fake_executor import reference_outputs, reference_prompt_logprobs
from tests.fakes.scheduler_driver import SchedulerDriver

VOCAB_SIZE = 8
# The token after which an executor may be told to sample no more.
BAD_TOKEN, EOS, STOP = 5, 6, 7
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
        # The fakes follow neither: these are requests whose tokens the host must know.
        bad_words=draw(st.sampled_from([(), (), ((1,),), ((1, 2),)])),
        grammar=draw(st.sampled_from([None, None, None, Grammar(GrammarForm.REGEX, ".*")])),
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
def configs(draw: st.DrawFn, max_steps_in_flight: int = 1) -> SchedulerConfig:
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
        max_steps_in_flight=max_steps_in_flight,
    )


@st.composite
def crowded_configs(draw: st.DrawFn, max_steps_in_flight: int = 1) -> SchedulerConfig:
    """Where many requests crowd a small pool."""
    return SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=draw(st.integers(8, 40)),
        max_model_len=48,
        max_waiting=100,
        num_blocks=12,
        block_size=4,
        prefix_cache=draw(st.booleans()),
        max_draft_tokens=draw(st.sampled_from([0, 5])),
        max_steps_in_flight=max_steps_in_flight,
    )


def run_workload(driver: SchedulerDriver, workload: list[Arrival]) -> None:
    """Runs to the end within a number of steps that starving or thrashing would exceed."""
    num_tokens = sum(len(each.prompt_token_ids) + each.sampling.max_tokens for each in workload)
    bound = LAST_EVENT + 2 + 10 * num_tokens
    for step in range(bound):
        for key, arrival in enumerate(workload):
            if arrival.step == step:
                _submit(driver, key, arrival)
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
                for key in leaving:
                    driver.abort(key)

            driver.step(while_executing)
        elif step > LAST_EVENT:
            return
    raise AssertionError(f"requests are still there after {bound} steps")


def _submit(driver: SchedulerDriver, key: int, arrival: Arrival) -> None:
    outputs, _ = reference_outputs(arrival.prompt_token_ids, arrival.sampling, VOCAB_SIZE)
    driver.will_answer(key, outputs)
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


def check_idle(driver: SchedulerDriver, num_blocks: int) -> None:
    load = driver.scheduler.load
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert load.num_free_blocks == num_blocks


def check_answers(
    driver: SchedulerDriver, workload: list[Arrival], *, nan_token_id: int | None = None
) -> None:
    """Every request that was not refused has ended, with the right answer or the head of it."""
    for key, request in driver.requests.items():
        arrival, received = workload[key], driver.received[key]
        expected, reason = _expected(arrival, nan_token_id)
        assert request.finish is not None
        outputs = list(request.output_token_ids)
        if request.finish.reason is FinishReason.CANCELLED or key in driver.failed:
            assert outputs == expected[: len(outputs)]
        else:
            assert (outputs, request.finish.reason) == (expected, reason)
        before = min(arrival.num_outputs_before, len(expected))
        assert received.token_ids == outputs[before:]
        assert received.num_starts <= 1
        if received.token_ids:
            assert received.num_starts == 1
            assert received.prompt_logprobs == _expected_prompt_logprobs(arrival)


def _expected(arrival: Arrival, nan_token_id: int | None) -> tuple[list[int], FinishReason]:
    outputs, reason = reference_outputs(arrival.prompt_token_ids, arrival.sampling, VOCAB_SIZE)
    if nan_token_id in arrival.prompt_token_ids:
        num_sampled = arrival.num_outputs_before
    elif nan_token_id in outputs:
        # Nothing is sampled after it.
        num_sampled = max(arrival.num_outputs_before, outputs.index(nan_token_id) + 1)
    else:
        num_sampled = len(outputs)
    return (
        (outputs, reason)
        if num_sampled >= len(outputs)
        else (
            outputs[:num_sampled],
            FinishReason.ERROR,
        )
    )


def _expected_prompt_logprobs(arrival: Arrival) -> list[TokenLogprobs]:
    if not arrival.sampling.prompt_logprobs:
        return []
    return reference_prompt_logprobs(arrival.prompt_token_ids, 2, VOCAB_SIZE)
