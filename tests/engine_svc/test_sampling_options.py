"""What a request asks of the sampler, from the wire's record to its tokens: scheduler and sampler
are real, the logits given. The effect of each option, and the faults other servers had.
"""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from torch import Tensor

from engine_svc.compute.prompt_scoring import MAX_ROWS_AT_ONCE
from engine_svc.messages import output_to_proto, request_from_record
from engine_svc.planning.errors import NoTokenLeft, SamplingFailed
from engine_svc.planning.request import Finish, FinishReason, RequestOutput
from engine_svc.planning.step import SamplingParameters
from gateway.job import choice_seed
from protos.common.v1 import common_pb2
from protos.wire.errors import InvalidRequest
from tests.fakes.scheduler_driver import SchedulerDriver, seeded
from tests.fakes.stub_logits import equal_logits, fixed_logits, stub_driver

VOCAB_SIZE = 64
SMOLLM2_VOCAB_SIZE = 49152
PROMPT = [1, 2, 3, 4, 5]
SEEDED = seeded(16, seed=42)
# A neighbour with every option set.
BUSY = seeded(
    16,
    seed=7,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=2.0,
    presence_penalty=1.0,
    frequency_penalty=0.5,
    min_tokens=16,
    eos_token_ids=frozenset({3}),
    logit_bias=((5, 4.0), (6, -100.0)),
    allowed_token_ids=frozenset(range(0, VOCAB_SIZE, 3)),
    bad_words=((9,), (5, 12)),
    logprobs=True,
    top_logprobs=2,
    prompt_logprobs=True,
)


def run(
    requests: dict[str, SamplingParameters], driver: SchedulerDriver | None = None
) -> dict[str, list[int]]:
    """The output ids of requests that are added in this order."""
    driver = driver or stub_driver(equal_logits(VOCAB_SIZE), VOCAB_SIZE)
    for key, sampling in requests.items():
        driver.add(key, PROMPT, sampling)
    driver.run(max_steps=1000)
    return {key: driver.received[key].token_ids for key in requests}


@pytest.fixture(scope="module")
def alone() -> list[int]:
    return run({"a": SEEDED})["a"]


def test_bug_41_the_same_seed_gives_the_same_ids_in_any_batch_and_order(alone: list[int]) -> None:
    assert len(alone) == 16 and len(set(alone)) > 5
    unseeded = {f"neighbour {index}": seeded(16, seed=1000 + index) for index in range(3)}
    assert run({"a": SEEDED, **unseeded})["a"] == alone
    assert run({**unseeded, "a": SEEDED})["a"] == alone
    assert run({"before": unseeded["neighbour 0"], "a": SEEDED, "after": BUSY})["a"] == alone
    penalised = dataclasses.replace(SEEDED, repetition_penalty=2.0)
    assert run({"penalised": penalised, "a": SEEDED})["a"] == alone
    assert run({"a": SEEDED, "penalised": penalised})["a"] == alone


def test_bug_41_requests_agree_by_their_seeds_alone(alone: list[int]) -> None:
    answers = run({"a": SEEDED, "b": SEEDED, "c": seeded(16, seed=43), "d": seeded(16, seed=44)})
    assert answers["a"] == answers["b"] == alone
    assert len({tuple(answers[key]) for key in "acd"}) == 3


def test_bug_41_no_option_of_a_request_touches_another() -> None:
    logits = fixed_logits(VOCAB_SIZE)
    requests = {"busy": BUSY, "plain": SEEDED, "greedy": SamplingParameters(16, temperature=0.0)}
    for name in ("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "top_k"):
        requests[name] = dataclasses.replace(SEEDED, **{name: getattr(BUSY, name)})
    together = run(requests, stub_driver(logits, VOCAB_SIZE))
    for key, sampling in requests.items():
        assert run({key: sampling}, stub_driver(logits, VOCAB_SIZE))[key] == together[key]
    assert len({tuple(answer) for answer in together.values()}) == len(together)


def test_seeds_reproduce_after_preemption_and_after_a_resume_with_every_option() -> None:
    logits = fixed_logits(VOCAB_SIZE)
    requests = {
        f"{name} {seed}": dataclasses.replace(sampling, seed=seed)
        for name, sampling in (("plain", SEEDED), ("busy", BUSY))
        for seed in range(3)
    }
    expected = run(requests, stub_driver(logits, VOCAB_SIZE))
    small = stub_driver(logits, VOCAB_SIZE, num_blocks=12, max_num_batched_tokens=8)
    assert run(requests, small) == expected
    assert small.scheduler.load.num_preemptions
    for num_outputs in range(1, 16):
        driver = stub_driver(logits, VOCAB_SIZE)
        for key, sampling in requests.items():
            driver.add(key, PROMPT, sampling, output_token_ids=expected[key][:num_outputs])
        driver.run(max_steps=20)
        for key in requests:
            assert driver.received[key].token_ids == expected[key][num_outputs:]


def test_choices_of_a_request_differ_and_reproduce(alone: list[int]) -> None:
    choices = {f"choice {i}": seeded(16, seed=choice_seed(42, i)) for i in range(5)}
    answers = run(choices)
    assert answers["choice 0"] == alone
    assert len({tuple(answer) for answer in answers.values()}) == 5
    assert run(dict(reversed(choices.items()))) == answers


def after_any(values: dict[int, float]) -> Tensor:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    for token_id, value in values.items():
        logits[0, token_id] = value
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bug_34_logits_of_minus_infinity_reach_the_wire_as_finite_numbers(
    temperature: float,
) -> None:
    def logits_after(token_ids: Tensor) -> Tensor:
        return after_any({17: 3.0}).repeat(len(token_ids), 1)

    asking = SamplingParameters(
        4, temperature, logprobs=True, top_logprobs=5, prompt_logprobs=True, top_prompt_logprobs=5
    )
    driver = stub_driver(logits_after, VOCAB_SIZE)
    request = driver.add("a", [*PROMPT, 17], asking)
    driver.run(max_steps=4)
    received = driver.received["a"]
    assert received.token_ids == [17] * 4
    message = output_to_proto(
        RequestOutput(
            request, (), tuple(received.logprobs), prompt_logprobs=tuple(received.prompt_logprobs)
        ),
        1,
    )
    assert [entry.logprob for entry in message.logprobs] == [0.0] * 4
    assert [entry.logprob for entry in message.prompt_logprobs] == [-9999.0] * 4 + [0.0]
    for entry in [*message.logprobs, *message.prompt_logprobs]:
        assert list(entry.top_logprobs) == [0.0, *[-9999.0] * 4]
        assert entry.top_token_ids[0] == 17
        json.dumps(list(entry.top_logprobs), allow_nan=False)


def test_bug_34_a_nan_logit_fails_its_own_request_alone() -> None:
    logits = fixed_logits(VOCAB_SIZE)

    def logits_after(token_ids: Tensor) -> Tensor:
        result = logits(token_ids).clone()
        result[token_ids == 60, 5] = torch.nan
        return result

    asking = dataclasses.replace(SEEDED, allowed_token_ids=frozenset(range(60)))
    expected = run({"a": asking}, stub_driver(logits_after, VOCAB_SIZE))["a"]
    driver = stub_driver(logits_after, VOCAB_SIZE)
    driver.add("bad", [*PROMPT, 60], dataclasses.replace(BUSY, max_tokens=5, min_tokens=0))
    assert run({"a": asking}, driver)["a"] == expected
    finish = driver.received["bad"].finish
    assert finish is not None and isinstance(finish.error, SamplingFailed)
    assert not isinstance(finish.error, NoTokenLeft)


def test_a_request_that_bans_all_it_allows_fails_alone_by_its_own_fault() -> None:
    dead_end = seeded(8, seed=1, allowed_token_ids=frozenset({4}), bad_words=((4, 4, 4),))
    driver = stub_driver(equal_logits(VOCAB_SIZE), VOCAB_SIZE)
    driver.add("dead end", PROMPT, dead_end)
    expected = run({"a": SEEDED})["a"]
    assert run({"a": SEEDED}, driver)["a"] == expected
    received = driver.received["dead end"]
    assert received.token_ids == [4, 4]
    assert received.finish is not None
    assert isinstance(received.finish.error, NoTokenLeft)


def bug_45_record(*biases: tuple[int, float]) -> common_pb2.GenerationRecord:
    sampling = common_pb2.SamplingParameters(
        max_tokens=6, temperature=1.0, top_p=1.0, repetition_penalty=1.0, seed=5
    )
    for token_id, bias in biases:
        sampling.logit_bias.add(token_id=token_id, bias=bias)
    return common_pb2.GenerationRecord(prompt_token_ids=[1, 2, 49151], sampling=sampling)


@pytest.mark.parametrize(
    ("biases", "is_valid"),
    [
        ([(49152, 5.0)], False),
        ([(5, 101.0)], False),
        ([(2**32 - 1, 5.0)], False),
        ([], True),
        ([(49151, -100.0)], True),
    ],
)
def test_bug_45_a_bias_outside_the_vocabulary_is_refused_and_the_next_request_is_the_same(
    biases: list[tuple[int, float]], is_valid: bool
) -> None:
    driver = stub_driver(equal_logits(SMOLLM2_VOCAB_SIZE), SMOLLM2_VOCAB_SIZE)

    def answer(key: str, *biases: tuple[int, float]) -> list[int]:
        request = request_from_record(bug_45_record(*biases), key, SMOLLM2_VOCAB_SIZE, now=0.0)
        driver.add(key, request.token_ids, request.sampling)
        driver.run(max_steps=6)
        return driver.received[key].token_ids

    before = answer("before")
    if is_valid:
        assert len(answer("biased", *biases)) == 6
    else:
        with pytest.raises(InvalidRequest) as caught:
            answer("biased", *biases)
        assert caught.value.param == "logit_bias"
    assert answer("after") == before


def test_min_tokens_holds_off_the_end_and_the_length_still_comes() -> None:
    # EOS and the stop token are by far the likeliest.
    def logits_after(token_ids: Tensor) -> Tensor:
        return after_any({0: 10.0, 1: 9.0, 2: 0.0, 3: -1.0}).repeat(len(token_ids), 1)

    def finish_of(min_tokens: int, **options: object) -> tuple[list[int], Finish | None]:
        sampling = SamplingParameters(
            6,
            temperature=0.0,
            min_tokens=min_tokens,
            stop_token_ids=frozenset({1}),
            **options,  # type: ignore[arg-type]
        )
        driver = stub_driver(logits_after, VOCAB_SIZE)
        driver.add("a", PROMPT, sampling)
        driver.run(max_steps=6)
        return driver.received["a"].token_ids, driver.received["a"].finish

    eos = frozenset({0})
    assert finish_of(0, eos_token_ids=eos) == ([0], Finish(FinishReason.STOP))
    assert finish_of(3, eos_token_ids=eos) == ([2, 2, 2, 0], Finish(FinishReason.STOP))
    assert finish_of(6, eos_token_ids=eos) == ([2] * 6, Finish(FinishReason.LENGTH))
    # Where EOS is ignored it is a token like any other, and the stop token still ends.
    assert finish_of(2)[0] == [0] * 6
    banned = finish_of(2, bad_words=((0,),))
    assert banned == ([2, 2, 1], Finish(FinishReason.STOP, stop_token_id=1))


def test_bad_words_never_appear_and_their_parts_do() -> None:
    driver = stub_driver(equal_logits(8), 8)
    words = ((0,), (1, 2), (3, 4, 5))
    for seed in range(20):
        driver.add(seed, [1, 3, 4], seeded(60, seed=seed, bad_words=words))
    driver.run(max_steps=400)
    followers: set[tuple[int, int]] = set()
    for received in driver.received.values():
        tokens = received.token_ids
        followers |= set(itertools.pairwise(tokens))
        for word in words:
            places = range(len(tokens) - len(word) + 1)
            assert not any(tuple(tokens[place : place + len(word)]) == word for place in places)
    assert {(3, 4), (4, 5), (2, 1)} <= followers
    # The prompt ends with 3, 4, and does not count.
    assert any(received.token_ids[0] == 5 for received in driver.received.values())


def test_prompt_logprobs_are_those_of_the_raw_logits() -> None:
    table = fixed_logits(VOCAB_SIZE)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(100)]
    raw = torch.log_softmax(table(torch.tensor(prompt)).double(), dim=-1)

    def logits(token_ids: Tensor) -> Tensor:
        # Logits of a whole prompt would not fit into memory where the vocabulary is large.
        assert len(token_ids) <= MAX_ROWS_AT_ONCE
        return table(token_ids)

    expected = [float(raw[i, prompt[i + 1]]) for i in range(99)]
    for max_num_batched_tokens in (8, 200):
        driver = stub_driver(
            logits, VOCAB_SIZE, max_num_batched_tokens=max_num_batched_tokens, num_blocks=40
        )
        for key in ("a", "b"):
            driver.add(key, prompt, dataclasses.replace(BUSY, top_prompt_logprobs=2, max_tokens=20))
        driver.run(max_steps=200)
        for received in driver.received.values():
            logprobs = [entry.logprob for entry in received.prompt_logprobs]
            assert logprobs == pytest.approx(expected, abs=1e-5)
            for entry, row in zip(received.prompt_logprobs, raw, strict=False):
                assert list(entry.top_token_ids) == torch.topk(row, 2).indices.tolist()
                assert all(math.isfinite(value) and value <= 0 for value in entry.top_logprobs)
