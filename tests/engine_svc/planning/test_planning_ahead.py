"""Planning a step while another runs, in named situations."""

from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.ngram_drafter import drafter_for
from engine_svc.planning.request import FinishReason, Request
from engine_svc.planning.step import Grammar, GrammarForm, SamplingParameters
from tests.fakes.fake_executor import reference_outputs, reference_prompt_logprobs
from tests.fakes.overlapping_driver import OverlappingDriver
from tests.fakes.overlapping_executor import OverlappingExecutor
from tests.fakes.scheduler_driver import greedy

VOCAB_SIZE = 64
FOLLOWED = Grammar(GrammarForm.REGEX, ".*")


def make_driver(
    *, num_blocks: int = 100, block_size: int = 4, nan_token_id: int | None = None, **limits: int
) -> OverlappingDriver:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
        "max_waiting": 100,
        "max_steps_in_flight": 2,
        **limits,
    }
    config = SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **values)
    executor = OverlappingExecutor(
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCAB_SIZE,
        nan_token_id=nan_token_id,
    )
    return OverlappingDriver(config, executor)


def distinct_prompt(number: int, length: int) -> list[int]:
    return [number, *range(length - 1)]


def expected(prompt: list[int], sampling: SamplingParameters) -> list[int]:
    return reference_outputs(prompt, sampling, VOCAB_SIZE)[0]


def test_a_lone_request_that_ends_by_length_is_planned_ahead_but_not_beyond_its_last_token() -> (
    None
):
    driver = make_driver()
    driver.add("a", distinct_prompt(1, 9), greedy(10))
    driver.run(max_steps=12)
    assert driver.received["a"].token_ids == expected(distinct_prompt(1, 9), greedy(10))
    assert len(driver.plans) == 10
    assert [plan.steps[0].num_computed_tokens for plan in driver.plans] == [0, *range(9, 18)]


def test_the_chunks_of_a_prompt_follow_one_another_in_flight() -> None:
    driver = make_driver(max_num_batched_tokens=4)
    driver.add("a", distinct_prompt(1, 11), greedy(2))
    first, second = driver.launch(), driver.launch()
    assert first is not None and second is not None
    assert [step.samples for step in (first.steps[0], second.steps[0])] == [False, False]
    assert second.steps[0].num_computed_tokens == 4
    driver.land()
    third = driver.launch()
    assert third is not None
    assert third.steps[0].num_scheduled_tokens == 3 and third.steps[0].samples
    driver.run(max_steps=5)
    assert driver.received["a"].token_ids == expected(distinct_prompt(1, 11), greedy(2))


def test_a_request_that_ends_keeps_row_and_blocks_until_what_is_computed_for_it_has_landed() -> (
    None
):
    prompt = distinct_prompt(1, 8)
    end = expected(prompt, greedy(2))[1]
    driver = make_driver(max_num_seqs=1)
    ending = driver.add("ending", prompt, greedy(50, eos_token_ids=frozenset({end})))
    driver.add("next", distinct_prompt(2, 8), greedy(2))
    for _ in range(3):
        driver.launch()
        if not driver.runner.may_launch:
            driver.land()
    # Its end came with the second step; the third computes for it all the same.
    assert ending.finish is not None and ending.finish.reason is FinishReason.STOP
    assert ending.row is not None and len(ending.block_ids) == 3
    assert driver.scheduler.load.num_free_blocks == 100 - 3
    assert driver.launch() is None
    driver.land()
    assert ending.row is None and driver.scheduler.load.num_free_blocks == 100
    assert driver.received["ending"].token_ids == expected(prompt, greedy(2))
    driver.run(max_steps=5)
    assert driver.received["next"].token_ids == expected(distinct_prompt(2, 8), greedy(2))


def test_a_request_that_ends_by_length_gives_its_row_back_though_another_step_runs() -> None:
    driver = make_driver(max_num_seqs=2)
    short = driver.add("short", distinct_prompt(1, 8), greedy(1))
    driver.add("long", distinct_prompt(2, 8), greedy(9))
    waiting = driver.add("waiting", distinct_prompt(3, 8), greedy(3))
    driver.launch()
    driver.launch()
    driver.land()
    assert short.finish is not None and short.row is None
    driver.launch()
    assert waiting.row is not None
    driver.run(max_steps=12)
    assert driver.received["waiting"].token_ids == expected(distinct_prompt(3, 8), greedy(3))


def test_what_needs_its_tokens_on_the_host_waits_for_them_and_holds_up_nobody() -> None:
    driver = make_driver()
    grammar = driver.add("grammar", distinct_prompt(1, 5), greedy(4, grammar=FOLLOWED))
    words = driver.add("words", distinct_prompt(2, 5), greedy(4, bad_words=((1, 2),)))
    other = driver.add("other", distinct_prompt(3, 5), greedy(8, bad_words=((1,),)))
    driver.launch()
    rows = {key: request.row for key, request in driver.requests.items()}
    in_steps = [{step.row for step in driver.plans[0].steps}]
    while driver.scheduler.has_requests and (plan := driver.step()) is not None:
        in_steps.append({step.row for step in plan.steps})
    driver.run(max_steps=10)
    assert all(rows["other"] in step for step in in_steps[:8])
    for key in ("grammar", "words"):
        assert [rows[key] in step for step in in_steps[:7]] == [True, False] * 3 + [True]
    for request in (grammar, words, other):
        prompt = request.token_ids[:5]
        assert driver.received[request.key].token_ids == expected(prompt, request.sampling)


def test_a_lone_request_with_a_grammar_goes_step_by_step_but_its_prompt_does_not() -> None:
    driver = make_driver(max_num_batched_tokens=4)
    driver.add("a", distinct_prompt(1, 8), greedy(3, grammar=FOLLOWED))
    assert driver.launch() is not None
    assert driver.launch() is not None
    driver.land()
    assert driver.launch() is None
    driver.land()
    assert driver.launch() is not None
    assert driver.launch() is None
    driver.run(max_steps=5)
    assert len(driver.received["a"].token_ids) == 3


def test_nobody_gives_way_while_a_step_is_in_flight() -> None:
    driver = make_driver(num_blocks=9, max_num_seqs=3)
    prompts = {key: distinct_prompt(number, 4) for number, key in enumerate("abc")}
    for key, prompt in prompts.items():
        driver.add(key, prompt, greedy(20))
    while not driver.scheduler.load.num_preemptions:
        was_idle = driver.runner.is_idle
        driver.step()
    assert was_idle
    driver.run(max_steps=200)
    for key, prompt in prompts.items():
        assert driver.received[key].token_ids == expected(prompt, greedy(20))


def test_a_request_that_fills_the_whole_pool_and_the_whole_context_comes_to_its_end() -> None:
    driver = make_driver(num_blocks=5, max_model_len=20)
    driver.add("a", distinct_prompt(1, 7), greedy(13))
    driver.run(max_steps=20)
    assert driver.received["a"].token_ids == expected(distinct_prompt(1, 7), greedy(13))
    assert len(driver.plans) == 13


def test_a_block_is_found_by_others_once_the_step_that_fills_it_has_landed() -> None:
    driver = make_driver()
    prompt = distinct_prompt(1, 12)
    driver.add("first", prompt, greedy(10))
    driver.launch()
    early = driver.add("early", [*prompt, 7], greedy(2))
    driver.launch()
    driver.land()
    late = driver.add("late", [*prompt, 8], greedy(2))
    driver.launch()
    assert (early.num_cached_tokens, late.num_cached_tokens) == (0, 12)
    driver.run(max_steps=20)
    for key, last in (("early", 7), ("late", 8)):
        assert driver.received[key].token_ids == expected([*prompt, last], greedy(2))


def test_log_probabilities_of_a_prompt_come_once_and_whole_from_chunks_in_flight() -> None:
    prompt = distinct_prompt(1, 18)
    driver = make_driver(max_num_batched_tokens=5)
    driver.add("a", prompt, greedy(3, prompt_logprobs=True, top_prompt_logprobs=3))
    driver.run(max_steps=12)
    assert driver.received["a"].prompt_logprobs == reference_prompt_logprobs(prompt, 3, VOCAB_SIZE)
    asked = [step.prompt_logprobs for plan in driver.plans for step in plan.steps]
    assert asked == [True] * 4 + [False] * 2


def test_a_prompt_of_whose_last_token_alone_nothing_is_asked_is_not_asked_about_there() -> None:
    prompt = distinct_prompt(1, 12)
    driver = make_driver(max_num_batched_tokens=11)
    outputs = expected(prompt, greedy(5))
    driver.add("a", prompt, greedy(5, prompt_logprobs=True), output_token_ids=outputs[:3])
    driver.run(max_steps=12)
    asked = [step.prompt_logprobs for plan in driver.plans for step in plan.steps]
    assert asked == [True, False, False]
    assert len(driver.received["a"].prompt_logprobs) == 11
    assert driver.received["a"].token_ids == outputs[3:]


def test_a_record_is_continued_after_the_outputs_it_holds() -> None:
    prompt = distinct_prompt(1, 6)
    outputs = expected(prompt, greedy(8))
    driver = make_driver()
    driver.add("again", prompt, greedy(8), output_token_ids=outputs[:5])
    driver.run(max_steps=10)
    assert driver.received["again"].token_ids == outputs[5:]
    assert len(driver.plans) == 3


def test_aborted_or_late_with_two_steps_in_flight_a_request_keeps_what_it_has_until_both_land() -> (
    None
):
    driver = make_driver()
    for key, deadline in (("aborted", 9.0), ("late", 1.0)):
        driver.add(key, distinct_prompt(1, 8), greedy(50), deadline=deadline)
    driver.launch()
    driver.launch()
    driver.abort("aborted")
    driver.end_late(now=2.0)
    assert not driver.scheduler.has_requests
    for _ in range(2):
        load = driver.scheduler.load
        assert (load.num_running, load.num_free_blocks) == (0, 100 - 6)
        driver.land()
    assert driver.scheduler.load.num_free_blocks == 100
    reasons = [entry.finish.reason for entry in driver.received.values() if entry.finish]
    assert reasons == [FinishReason.CANCELLED, FinishReason.TIMEOUT]


def test_a_row_that_cannot_be_sampled_fails_alone_and_its_blocks_are_never_found() -> None:
    bad_prompt = [63, *distinct_prompt(1, 11)]
    driver = make_driver(nan_token_id=63)
    driver.add("good", distinct_prompt(2, 12), greedy(4))
    driver.add("bad", bad_prompt, greedy(4))
    driver.run(max_steps=8)
    finish = driver.received["bad"].finish
    assert finish is not None and finish.reason is FinishReason.ERROR
    assert driver.received["good"].token_ids == expected(distinct_prompt(2, 12), greedy(4))
    again = driver.add("again", bad_prompt, greedy(4))
    driver.run(max_steps=8)
    assert again.num_cached_tokens == 0


def test_a_failed_step_ends_what_is_in_flight_and_leaves_those_that_wait() -> None:
    driver = make_driver(num_blocks=12, max_num_seqs=2, max_num_batched_tokens=4)
    for number, key in enumerate(("first", "second", "waiting")):
        driver.add(key, distinct_prompt(number, 3), greedy(5))
    scheduler = driver.scheduler
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert plans[0] is not None and plans[1] is not None
    error = RuntimeError("device lost")
    outputs = scheduler.fail(plans[0], error)
    assert [(output.request.key, output.finish.error) for output in outputs if output.finish] == [
        ("first", error),
        ("second", error),
    ]
    assert scheduler.load.num_free_blocks == 12
    driver.run(max_steps=10)
    finish = driver.received["waiting"].finish
    assert finish is not None and finish.reason is FinishReason.LENGTH


def test_there_are_no_drafts_where_tokens_are_known_too_late_for_them() -> None:
    limits = make_driver(max_draft_tokens=8).config
    assert drafter_for(limits) is None


def test_only_words_of_several_tokens_and_grammars_need_tokens_on_the_host() -> None:
    needing = {
        (): False,
        ((1,), (2,)): False,
        ((1,), (2, 3)): True,
    }
    for words, needs in needing.items():
        assert Request("a", [1], 1, greedy(1, bad_words=words)).needs_tokens_on_host is needs
    assert Request("a", [1], 1, greedy(1, grammar=FOLLOWED)).needs_tokens_on_host
