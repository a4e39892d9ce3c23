"""What the scheduler does in named situations; test_scheduler_properties.py has the random ones."""

import pytest

from engine_svc.planning.errors import (
    ContextLengthExceeded,
    KvCapacityExceeded,
    SamplingFailed,
    WaitingQueueFull,
)
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import FinishReason, RequestStatus
from engine_svc.planning.step import RowStep
from tests.fakes.fake_executor import FakeExecutor, reference_outputs
from tests.fakes.scheduler_driver import SchedulerDriver, greedy, seeded

VOCAB_SIZE = 64


def make_driver(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 200,
    max_waiting: int = 100,
    prefix_cache: bool = True,
    nan_token_id: int | None = None,
) -> SchedulerDriver:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_cache=prefix_cache,
    )
    executor = FakeExecutor(
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCAB_SIZE,
        nan_token_id=nan_token_id,
    )
    return SchedulerDriver(config, executor.execute)


def distinct_prompt(number: int, length: int) -> list[int]:
    return [number, *range(length - 1)]


def test_a_request_is_answered_as_the_reference_says_and_leaves_nothing_behind() -> None:
    driver = make_driver()
    sampling = seeded(10, seed=5, logprobs=True, top_logprobs=2)
    request = driver.add("a", distinct_prompt(1, 9), sampling)
    assert request.status is RequestStatus.WAITING
    assert driver.run(max_steps=10) == 10
    received = driver.received["a"]
    expected, reason = reference_outputs(distinct_prompt(1, 9), sampling, VOCAB_SIZE)
    assert (received.token_ids, received.finish.reason) == (expected, reason)
    assert received.num_starts == 1
    assert [len(entry.top_token_ids) for entry in received.logprobs] == [2] * 10
    assert request.status is RequestStatus.FINISHED
    load = driver.scheduler.load
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, 100)
    assert load.num_steps == 10


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    decoding = driver.add("short", distinct_prompt(1, 3), greedy(20))
    driver.step()
    prefilling = driver.add("long", distinct_prompt(2, 20), greedy(5))
    plans = [driver.step() for _ in range(3)]
    assert decoding.status is RequestStatus.DECODING
    scheduled = [[step.num_scheduled_tokens for step in plan.steps] for plan in plans]
    assert scheduled == [[1, 7], [1, 7], [1, 6]]
    assert [plan.steps[1].samples for plan in plans] == [False, False, True]
    assert prefilling.num_tokens == 21


def test_requests_start_by_priority_and_then_by_arrival() -> None:
    driver = make_driver(max_num_seqs=1)
    for key, priority in [("a", 0), ("b", 5), ("c", 5), ("d", -1)]:
        driver.add(key, distinct_prompt(ord(key) % 8, 3), greedy(2), priority=priority)
    started = []
    while driver.scheduler.has_requests:
        waiting = {key for key, entry in driver.received.items() if not entry.num_starts}
        driver.step()
        started += [key for key in sorted(waiting) if driver.received[key].num_starts]
    assert started == ["b", "c", "a", "d"]


def test_a_head_of_queue_that_does_not_fit_yet_is_not_overtaken() -> None:
    driver = make_driver(num_blocks=10)
    driver.add("running", distinct_prompt(1, 20), greedy(4))
    driver.step()
    driver.add("large", distinct_prompt(2, 24), greedy(2))
    driver.add("small", distinct_prompt(3, 2), greedy(2))
    driver.step()
    assert driver.scheduler.load.num_waiting == 2
    driver.run(max_steps=10)
    assert driver.received["large"].finish.reason is FinishReason.LENGTH


def test_a_start_leaves_a_block_to_spare_for_each_request_that_runs() -> None:
    driver = make_driver(num_blocks=10, block_size=4, max_num_seqs=2)
    running = driver.add("running", distinct_prompt(1, 28), greedy(12))
    driver.add("waiting", distinct_prompt(2, 9), greedy(1))
    driver.step()
    # Its three blocks are free, but the first decode of `running` would take one of them back.
    assert driver.scheduler.load.num_free_blocks == 3
    assert driver.scheduler.load.num_waiting == 1
    driver.add("small", distinct_prompt(3, 4), greedy(1), priority=1)
    driver.step()
    assert driver.received["small"].finish is not None
    driver.run(max_steps=20)
    assert running.num_preemptions == 0


def test_the_victim_of_preemption_is_the_newest_of_the_lowest_priority() -> None:
    driver = make_driver(num_blocks=9, max_num_seqs=3, prefix_cache=False)
    requests = {
        key: driver.add(key, distinct_prompt(number, 4), greedy(20), priority=priority)
        for number, (key, priority) in enumerate([("low", 0), ("old", 1), ("new", 1)])
    }
    while not driver.scheduler.load.num_preemptions:
        driver.step()
    assert [key for key, request in requests.items() if request.num_preemptions] == ["low"]
    assert requests["low"].status is RequestStatus.WAITING
    driver.run(max_steps=200)
    assert not requests["old"].num_preemptions
    for number, key in enumerate(requests):
        expected, _ = reference_outputs(distinct_prompt(number, 4), greedy(20), VOCAB_SIZE)
        assert driver.received[key].token_ids == expected
        assert driver.received[key].num_starts == 1


def test_the_last_in_order_sits_out_steps_rather_than_evict_one_before_it_or_itself() -> None:
    driver = make_driver(num_blocks=11, max_num_seqs=2, max_num_batched_tokens=4)
    last = driver.add("last", distinct_prompt(1, 4), greedy(10))
    driver.step()
    # Its prompt takes eight blocks at once and many steps, so `last` reaches the end of the pool.
    driver.add("first", distinct_prompt(2, 32), greedy(1), priority=1)
    rows = [[step.row for step in driver.step().steps] for _ in range(10)]
    assert [last.row in step_rows for step_rows in rows] == [True] * 8 + [False] * 2
    assert last.num_computed_tokens == 12
    driver.run(max_steps=20)
    assert driver.scheduler.load.num_preemptions == 0
    expected, _ = reference_outputs(distinct_prompt(1, 4), greedy(10), VOCAB_SIZE)
    assert driver.received["last"].token_ids == expected


def test_a_request_of_higher_priority_that_waits_takes_nothing_from_those_that_run() -> None:
    driver = make_driver(num_blocks=4, max_num_seqs=2)
    driver.add("running", distinct_prompt(1, 8), greedy(6))
    driver.step()
    driver.add("urgent", distinct_prompt(2, 8), greedy(6), priority=9)
    driver.step()
    assert driver.requests["urgent"].status is RequestStatus.WAITING
    driver.run(max_steps=20)
    assert driver.scheduler.load.num_preemptions == 0


def test_a_request_that_shares_a_running_prefix_takes_only_the_rest() -> None:
    driver = make_driver(block_size=4)
    prompt = distinct_prompt(1, 12)
    first = driver.add("first", prompt, greedy(10))
    driver.step()
    second = driver.add("second", [*prompt, 7], greedy(10))
    driver.step()
    assert second.num_cached_tokens == 12
    assert second.block_ids[:3] == first.block_ids[:3]
    assert driver.scheduler.load.num_free_blocks == 100 - 4 - 1
    driver.run(max_steps=20)
    assert driver.scheduler.load.num_free_blocks == 100
    assert driver.scheduler.load.num_prefix_cache_query_tokens == 25
    assert driver.scheduler.load.num_prefix_cache_hit_tokens == 12


def test_outputs_are_cached_too_so_the_next_turn_of_a_chat_finds_them() -> None:
    driver = make_driver(block_size=4)
    driver.add("turn 1", distinct_prompt(1, 6), greedy(11))
    driver.run(max_steps=20)
    history = [*distinct_prompt(1, 6), *driver.received["turn 1"].token_ids]
    # The last token was sampled but never computed, so 16 of 17 tokens have KV.
    next_turn = driver.add("turn 2", [*history, 3, 3], greedy(2))
    driver.run(max_steps=20)
    assert next_turn.num_cached_tokens == 16


def test_requests_of_different_salts_share_nothing() -> None:
    driver = make_driver()
    prompt = distinct_prompt(1, 12)
    for key, salt in [("a", "tenant 1"), ("b", "tenant 2"), ("c", "tenant 1")]:
        driver.add(key, prompt, greedy(2), cache_salt=salt)
        driver.run(max_steps=5)
    assert [driver.requests[key].num_cached_tokens for key in "abc"] == [0, 0, 8]


def test_a_record_is_continued_after_the_outputs_it_holds() -> None:
    driver = make_driver()
    prompt, sampling = distinct_prompt(1, 6), seeded(8, seed=-3)
    expected, _ = reference_outputs(prompt, sampling, VOCAB_SIZE)
    driver.add("again", prompt, sampling, output_token_ids=expected[:5])
    driver.run(max_steps=10)
    assert driver.received["again"].token_ids == expected[5:]
    assert driver.received["again"].finish.reason is FinishReason.LENGTH


def test_a_record_whose_outputs_are_complete_is_finished_without_a_step() -> None:
    driver = make_driver()
    request = driver.add("done", [1, 2], greedy(2), output_token_ids=[3, 4])
    assert request.finish is not None
    assert request.finish.reason is FinishReason.LENGTH
    assert not driver.scheduler.has_requests


def test_a_request_longer_than_the_model_or_the_pool_is_refused_at_once() -> None:
    driver = make_driver(num_blocks=25, block_size=4, max_model_len=128)
    with pytest.raises(ContextLengthExceeded, match=r"100 tokens .* 29, together 129; .* 128"):
        driver.add("model", distinct_prompt(1, 100), greedy(29))
    with pytest.raises(KvCapacityExceeded, match=r"together 101; .* KV memory for 100 tokens"):
        driver.add("pool", distinct_prompt(1, 99), greedy(2))
    driver.add("fits", distinct_prompt(1, 99), greedy(1))
    driver.run(max_steps=3)
    assert driver.received["fits"].finish.reason is FinishReason.LENGTH


def test_the_waiting_queue_is_bounded_and_takes_requests_again_once_it_is_shorter() -> None:
    driver = make_driver(max_num_seqs=1, max_waiting=2)
    for key in ("running", "waiting 1"):
        driver.add(key, [1, 2], greedy(5))
        driver.step()
    driver.add("waiting 2", [1, 2], greedy(5))
    with pytest.raises(WaitingQueueFull):
        driver.add("refused", [1, 2], greedy(5))
    driver.run(max_steps=20)
    driver.add("accepted", [1, 2], greedy(5))


def test_a_step_budget_too_small_for_all_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make_driver(max_num_seqs=8, max_num_batched_tokens=7)


def test_an_abort_is_answered_once_in_each_state() -> None:
    driver = make_driver(max_num_seqs=2, max_num_batched_tokens=4)
    driver.add("decoding", [1, 2], greedy(50))
    driver.step()
    driver.add("prefilling", distinct_prompt(2, 30), greedy(50))
    driver.add("waiting", distinct_prompt(3, 30), greedy(50))
    driver.step()
    assert [request.status.value for request in driver.requests.values()] == list(driver.requests)
    for key in ("waiting", "prefilling", "decoding"):
        driver.abort(key)
        driver.abort(key)
        assert driver.received[key].finish.reason is FinishReason.CANCELLED
    assert not driver.scheduler.has_requests
    assert driver.scheduler.load.num_free_blocks == 100


def test_blocks_and_row_of_a_request_aborted_during_a_step_are_kept_until_its_commit() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("aborted", distinct_prompt(1, 8), greedy(50))
    driver.step()

    def abort() -> None:
        driver.abort("aborted")
        assert driver.scheduler.load.num_free_blocks == 100 - 3
        assert driver.scheduler.load.num_running == 0

    num_tokens = len(driver.received["aborted"].token_ids)
    driver.add("next", distinct_prompt(2, 8), greedy(2))
    driver.step(while_executing=abort)
    assert len(driver.received["aborted"].token_ids) == num_tokens
    assert driver.scheduler.load.num_free_blocks == 100
    driver.run(max_steps=5)
    assert (
        driver.received["next"].token_ids
        == (reference_outputs(distinct_prompt(2, 8), greedy(2), VOCAB_SIZE)[0])
    )


def test_a_row_that_cannot_be_sampled_fails_alone_and_its_blocks_are_never_reused_as_cache() -> (
    None
):
    driver = make_driver(nan_token_id=63)
    bad_prompt = [63, *distinct_prompt(1, 11)]
    driver.add("good", distinct_prompt(2, 12), greedy(4))
    driver.add("bad", bad_prompt, greedy(4))
    driver.run(max_steps=5)
    finish = driver.received["bad"].finish
    assert finish.reason is FinishReason.ERROR
    assert isinstance(finish.error, SamplingFailed)
    assert (
        driver.received["good"].token_ids
        == (reference_outputs(distinct_prompt(2, 12), greedy(4), VOCAB_SIZE)[0])
    )
    again = driver.add("again", bad_prompt, greedy(4))
    driver.run(max_steps=5)
    assert again.num_cached_tokens == 0


def test_a_failed_step_ends_only_the_requests_that_were_in_it() -> None:
    driver = make_driver(num_blocks=12, max_num_seqs=1)
    driver.add("running", [1, 2, 3], greedy(5))
    driver.add("waiting", [4, 5, 6], greedy(5))
    scheduler = driver.scheduler
    plan = scheduler.schedule()
    error = RuntimeError("device lost")
    outputs = scheduler.fail(plan, error)
    assert [(output.request.key, output.finish.error) for output in outputs] == [("running", error)]
    assert scheduler.load.num_free_blocks == 12
    driver.run(max_steps=6)
    assert driver.received["waiting"].finish.reason is FinishReason.LENGTH


def test_the_plan_says_only_what_changed() -> None:
    driver = make_driver(block_size=4)
    driver.add("a", distinct_prompt(1, 4), greedy(6))
    plans = [driver.step() for _ in range(6)]
    assert [len(plan.starts) for plan in plans] == [1, 0, 0, 0, 0, 0]
    row = plans[0].starts[0].row
    assert [len(plan.steps[0].new_block_ids) for plan in plans] == [1, 1, 0, 0, 0, 1]
    assert plans[2].steps[0] == RowStep(row, 5, 1, (), True)
