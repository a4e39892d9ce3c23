"""Grammars in a batch: each row follows its own, through preemption, and no other row's."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_svc.compute import grammar_compiler
from engine_svc.compute.executor import Executor
from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.planning.errors import NoTokenLeft
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import Finish, FinishReason
from engine_svc.planning.step import Grammar, SamplingParameters
from tests.fakes.decoding import load_tiny_executor
from tests.fakes.grammars import byte_level_compiler, ids_of, lark, regex, schema, text_of
from tests.fakes.scheduler_driver import SchedulerDriver
from tests.fakes.tiny_models import write_tiny_llama
from tests.fakes.tiny_tokenizers import IM_END

STOPPED = Finish(FinishReason.STOP)
PROMPT = ids_of("say it")
PERSON = schema(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with byte_level_compiler() as compiler:
        yield compiler


@pytest.fixture(scope="module")
def executor(model_path: Path, compiler: GrammarCompiler) -> Executor:
    executor = load_tiny_executor(model_path)
    executor.follow_grammars(compiler)
    return executor


def sampling(grammar: Grammar | None, **others: object) -> SamplingParameters:
    values: dict[str, object] = {"max_tokens": 60, "temperature": 1.5, "seed": 1}
    eos = frozenset({IM_END, 100_000})
    return SamplingParameters(grammar=grammar, eos_token_ids=eos, **(values | others))  # type: ignore[arg-type]


def make_driver(executor: Executor, num_blocks: int = 64) -> SchedulerDriver:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=executor.max_model_len,
        max_waiting=100,
        num_blocks=num_blocks,
        block_size=executor.block_size,
    )
    return SchedulerDriver(config, executor.execute)


def generate(
    executor: Executor, requests: list[SamplingParameters], num_blocks: int = 64
) -> list[tuple[str, Finish | None]]:
    """The text and finish of each, all in one batch."""
    driver = make_driver(executor, num_blocks)
    for index, parameters in enumerate(requests):
        driver.add(index, PROMPT, parameters)
    driver.run(max_steps=1000)
    received = [driver.received[index] for index in range(len(requests))]
    return [(text_of(one.token_ids), one.finish) for one in received]


def test_every_row_follows_its_own_grammar(executor: Executor) -> None:
    patterns = [r"[ab]{5}", r"(no|yes)!", r"[0-9]{1,3}(ö|日)", r"x*y"]
    requests = [sampling(regex(pattern), seed=seed) for seed in (1, 2) for pattern in patterns]
    for (text, finish), pattern in zip(generate(executor, requests), 2 * patterns, strict=True):
        assert re.fullmatch(pattern, text)
        assert finish == STOPPED


def test_rows_without_a_grammar_are_not_touched(executor: Executor) -> None:
    free = sampling(None, max_tokens=20)
    ((alone, _),) = generate(executor, [free])
    answers = generate(executor, [sampling(PERSON), free, sampling(regex("a{20}")), free])
    assert answers[1] == answers[3] == (alone, answers[1][1])


def test_a_grammar_s_answer_does_not_depend_on_the_batch(executor: Executor) -> None:
    (alone,) = generate(executor, [sampling(PERSON)])
    assert json.loads(alone[0])["name"] in ("Ada", "Bo")
    others = [sampling(regex("[a-z]{30}"), seed=seed) for seed in range(3)]
    assert generate(executor, [*others, sampling(PERSON)])[3] == alone


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"logit_bias": ((ord("A"), 100.0),)},
        {"min_tokens": 5},
    ],
)
def test_a_grammar_holds_with_every_other_option(executor: Executor, options) -> None:
    ((text, finish),) = generate(executor, [sampling(PERSON, **options)])
    assert set(json.loads(text)) == {"name", "age"}
    assert finish == STOPPED


def test_eos_comes_only_where_the_grammar_may_end(executor: Executor) -> None:
    eager = sampling(regex("ab(cd)?"), logit_bias=((IM_END, 100.0),))
    driver = make_driver(executor)
    driver.add("eager", PROMPT, eager)
    driver.run(max_steps=20)
    assert driver.received["eager"].token_ids == [*ids_of("ab"), IM_END]
    # Without an EOS of its own a request goes on while the grammar lets it.
    patient = dataclasses.replace(eager, eos_token_ids=frozenset())
    assert generate(executor, [patient]) == [("abcd", STOPPED)]


def test_a_text_that_is_complete_stops_even_as_the_last_token_allowed(executor: Executor) -> None:
    assert generate(executor, [sampling(regex("abc"), max_tokens=3)]) == [("abc", STOPPED)]
    ((text, finish),) = generate(executor, [sampling(regex("abc"), max_tokens=2)])
    assert (text, finish) == ("ab", Finish(FinishReason.LENGTH))


def test_logprobs_are_of_the_raw_logits(executor: Executor) -> None:
    driver = make_driver(executor)
    driver.add("masked", PROMPT, sampling(regex("~{4}"), logprobs=True, top_logprobs=3))
    driver.run(max_steps=20)
    entries = driver.received["masked"].logprobs
    assert len(entries) == 4
    assert all(-9999.0 < entry.logprob < 0.0 for entry in entries)
    assert any(ids_of("~")[0] not in entry.top_token_ids for entry in entries)


def test_preempted_rows_go_on_as_they_were(executor: Executor) -> None:
    requests = [
        sampling(PERSON, seed=1),
        sampling(regex("[a-z]{40}"), seed=2),
        sampling(lark('start: "(" /[0-9]{30}/ ")"'), seed=3),
        sampling(None, seed=4, max_tokens=40),
    ]
    driver = make_driver(executor, num_blocks=7)
    for index, parameters in enumerate(requests):
        driver.add(index, PROMPT, parameters)
    driver.run(max_steps=1000)
    assert sum(request.num_preemptions for request in driver.requests.values()) > 1
    received = [driver.received[index] for index in range(len(requests))]
    answers = [(text_of(one.token_ids), one.finish) for one in received]
    assert answers == generate(executor, requests, num_blocks=64)


def test_a_record_with_outputs_goes_on_as_it_was(executor: Executor) -> None:
    parameters = sampling(PERSON)
    driver = make_driver(executor)
    driver.add("whole", PROMPT, parameters)
    driver.run(max_steps=100)
    outputs = driver.received["whole"].token_ids
    resumed = make_driver(executor)
    resumed.add("rest", PROMPT, parameters, output_token_ids=outputs[:9])
    resumed.run(max_steps=100)
    assert resumed.received["rest"].token_ids == outputs[9:]
    assert resumed.received["rest"].finish == STOPPED


def test_a_request_with_no_token_left_fails_alone(executor: Executor) -> None:
    driver = make_driver(executor)
    driver.add("dead", PROMPT, sampling(regex("[0-9]+"), allowed_token_ids=frozenset(ids_of("x"))))
    driver.add("alive", PROMPT, sampling(regex("[0-9]{3}")))
    driver.run(max_steps=20)
    finish = driver.received["dead"].finish
    assert finish is not None
    assert isinstance(finish.error, NoTokenLeft)
    assert driver.received["dead"].token_ids == []
    assert driver.received["alive"].finish == STOPPED


def test_a_full_lexer_is_made_anew(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What copies of a matcher share grows with their texts; rows must not fail of one another."""
    limits = grammar_compiler._LIMITS | {"max_lexer_states": 110}
    monkeypatch.setattr(grammar_compiler, "_LIMITS", limits)
    words = regex("(apple|banana|cherry|damson|elder|fig|grape|hazel|[0-9]{3}|-){20}")
    with byte_level_compiler() as compiler:
        executor = load_tiny_executor(model_path)
        executor.follow_grammars(compiler)
        first = compiler.matcher(words)
        answers = generate(executor, [sampling(words, seed=seed) for seed in range(6)])
        assert all(finish is not None and finish.error is None for _, finish in answers)
        # The matcher that was kept at first is full.
        assert not first.consume_tokens(ids_of("grape" * 3))


def test_a_grammar_that_outgrows_the_limits_fails_its_request_alone(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = grammar_compiler._LIMITS | {"max_lexer_states": 60}
    monkeypatch.setattr(grammar_compiler, "_LIMITS", limits)
    with byte_level_compiler() as compiler:
        executor = load_tiny_executor(model_path)
        executor.follow_grammars(compiler)
        driver = make_driver(executor)
        driver.add("large", PROMPT, sampling(regex("(ab|cd|ef|[0-9]){30}")))
        driver.add("small", PROMPT, sampling(regex("[0-9]{3}")))
        driver.run(max_steps=100)
    finish = driver.received["large"].finish
    assert finish is not None
    assert "too complex" in str(finish.error)
    assert driver.received["small"].finish == STOPPED
