"""Requests are validated at the edge, and every field is carried both ways."""

import math

import pytest

from engine_svc.messages import (
    MAX_TOP_LOGPROBS,
    load_to_proto,
    output_to_proto,
    request_from_record,
    wire_error,
)
from engine_svc.planning.errors import (
    ContextLengthExceeded,
    KvCapacityExceeded,
    NoTokenLeft,
    SamplingFailed,
    WaitingQueueFull,
)
from engine_svc.planning.limits import SchedulerLoad
from engine_svc.planning.request import Finish, FinishReason, Request, RequestOutput
from engine_svc.planning.step import Grammar, GrammarForm, SamplingParameters, TokenLogprobs
from protos.common.v1 import common_pb2
from protos.wire.errors import InternalError, InvalidRequest, Overloaded, Unavailable

VOCAB_SIZE = 100
FLOAT_FIELDS = [
    field.name
    for field in common_pb2.SamplingParameters.DESCRIPTOR.fields
    if field.type == field.TYPE_DOUBLE
]


def words(token_ids: list[int]) -> common_pb2.TokenSequence:
    return common_pb2.TokenSequence(token_ids=token_ids)


def bias(token_id: int, value: float) -> list[common_pb2.LogitBias]:
    return [common_pb2.LogitBias(token_id=token_id, bias=value)]


def record(**changes: object) -> common_pb2.GenerationRecord:
    values: dict[str, object] = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": -5,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "eos_token_ids": [2, 100_000],
        "stop_token_ids": [99],
        "logprobs": True,
        "top_logprobs": 4,
        "min_tokens": 2,
        "logit_bias": [
            common_pb2.LogitBias(token_id=8, bias=-100.0),
            common_pb2.LogitBias(token_id=0, bias=0.5),
        ],
        "allowed_token_ids": [0, 8, 9, 99],
        "bad_words": [words([9]), words([8, 0, 99])],
        "prompt_logprobs": True,
        "top_prompt_logprobs": 6,
    }
    fields = {"prompt_token_ids": [1, 2, 3], "output_token_ids": [4]}
    for name, value in changes.items():
        (values if name in values else fields)[name] = value  # type: ignore[assignment]
    sampling = common_pb2.SamplingParameters(**values)  # type: ignore[arg-type]
    return common_pb2.GenerationRecord(sampling=sampling, **fields)  # type: ignore[arg-type]


def test_what_a_sequence_may_take_becomes_its_deadline() -> None:
    request = request_from_record(record(timeout_ms=1500), "key", VOCAB_SIZE, now=10.0)
    assert request.deadline == 11.5


def test_every_field_of_a_record_reaches_the_request() -> None:
    request = request_from_record(record(priority=-3, cache_salt="s"), "key", VOCAB_SIZE, now=0.0)
    assert request.key == "key"
    assert (request.token_ids, request.num_prompt_tokens) == ([1, 2, 3, 4], 3)
    assert (request.priority, request.cache_salt) == (-3, "s")
    assert request.deadline == math.inf
    assert request.sampling == SamplingParameters(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=-5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        eos_token_ids=frozenset({2, 100_000}),
        stop_token_ids=frozenset({99}),
        logprobs=True,
        top_logprobs=4,
        min_tokens=2,
        logit_bias=((8, -100.0), (0, 0.5)),
        allowed_token_ids=frozenset({0, 8, 9, 99}),
        bad_words=((9,), (8, 0, 99)),
        prompt_logprobs=True,
        top_prompt_logprobs=6,
    )


@pytest.mark.parametrize("form", GrammarForm)
def test_a_grammar_of_each_form_reaches_the_request(form: GrammarForm) -> None:
    with_grammar = record()
    with_grammar.sampling.grammar.CopyFrom(common_pb2.Grammar(**{form.value: "text"}))
    request = request_from_record(with_grammar, "key", VOCAB_SIZE, now=0.0)
    assert request.sampling.grammar == Grammar(form, "text")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1, 100]}, "prompt_token_ids"),
        ({"output_token_ids": [100]}, "output_token_ids"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),
        ({"top_logprobs": 33}, "top_logprobs"),
        ({"top_prompt_logprobs": 33}, "top_prompt_logprobs"),
        ({"min_tokens": 8}, "min_tokens"),
        ({"logit_bias": bias(100, 1.0)}, "logit_bias"),
        ({"logit_bias": bias(5, 100.5)}, "logit_bias"),
        ({"logit_bias": bias(5, -101)}, "logit_bias"),
        ({"logit_bias": bias(5, math.nan)}, "logit_bias"),
        ({"allowed_token_ids": [1, 100]}, "allowed_token_ids"),
        ({"bad_words": [words([])]}, "bad_words"),
        ({"bad_words": [words([1, 100])]}, "bad_words"),
        ({"allowed_token_ids": [5], "bad_words": [words([5])]}, "bad_words"),
        ({"allowed_token_ids": [2, 99], "bad_words": []}, "min_tokens"),
        (
            {"allowed_token_ids": [], "bad_words": [words([token]) for token in range(100)]},
            "bad_words",
        ),
    ],
)
def test_a_bad_field_is_named(change: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_from_record(record(**change), "key", VOCAB_SIZE, now=0.0)
    assert caught.value.param == param
    assert caught.value.message


@pytest.mark.parametrize("name", FLOAT_FIELDS)
# The last two are infinite in float32.
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, -1e39])
def test_numbers_that_cannot_be_computed_are_refused_in_every_field(
    name: str, value: float
) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be a finite number in") as caught:
        request_from_record(record(**{name: value}), "key", VOCAB_SIZE, now=0.0)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "change",
    [
        # The ends of what gateways let through; what is 0 in float32 means as much as 0 here.
        {"temperature": 0.0, "min_p": 0.0, "top_p": 1.0, "top_logprobs": 20},
        {"temperature": 1e-46, "min_p": 1e-46, "top_p": 1e-46},
        {"temperature": 2.0, "min_p": 1.0, "repetition_penalty": 10.0},
        {"repetition_penalty": 1e-30, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"temperature": 1e30, "presence_penalty": 1e30, "frequency_penalty": -1e30},
        {"top_logprobs": MAX_TOP_LOGPROBS, "top_prompt_logprobs": MAX_TOP_LOGPROBS},
    ],
)
def test_numbers_that_can_be_computed_are_taken_as_they_are(change: dict[str, object]) -> None:
    request = request_from_record(record(**change), "key", VOCAB_SIZE, now=0.0)
    assert {name: getattr(request.sampling, name) for name in change} == change


def test_no_more_likeliest_tokens_are_listed_than_the_vocabulary_has() -> None:
    with pytest.raises(InvalidRequest, match="top_logprobs must be at most 5"):
        listing = common_pb2.SamplingParameters(max_tokens=1, top_p=1.0, top_logprobs=6)
        listing.repetition_penalty = 1.0
        asked = common_pb2.GenerationRecord(prompt_token_ids=[1], sampling=listing)
        request_from_record(asked, "key", 5, now=0.0)


def test_every_field_of_an_output_reaches_the_wire() -> None:
    request = Request("key", [1, 2], 2, SamplingParameters(max_tokens=1))
    request.num_cached_tokens = 16
    logprobs = (TokenLogprobs(-0.5, [7, 8], [-0.5, -1.5]),)
    finish = Finish(FinishReason.STOP, stop_token_id=7)
    of_prompt = (TokenLogprobs(-9999.0, [6], [-0.25]), TokenLogprobs(-1.0))
    message = output_to_proto(RequestOutput(request, (7,), logprobs, True, finish, of_prompt), 3)
    assert (message.sequence_id, list(message.token_ids)) == (3, [7])
    assert list(message.logprobs[0].top_token_ids) == [7, 8]
    assert list(message.logprobs[0].top_logprobs) == [-0.5, -1.5]
    assert [entry.logprob for entry in message.prompt_logprobs] == [-9999.0, -1.0]
    assert list(message.prompt_logprobs[0].top_token_ids) == [6]
    assert list(message.prompt_logprobs[0].top_logprobs) == [-0.25]
    assert (message.prefill_started, message.num_cached_tokens) == (True, 16)
    assert message.finish.reason == common_pb2.FINISH_REASON_STOP
    assert message.finish.stop_token_id == 7


def test_an_output_without_finish_has_none_on_the_wire() -> None:
    request = Request("key", [1, 2], 2, SamplingParameters(max_tokens=1))
    message = output_to_proto(RequestOutput(request, (7,)), 3)
    assert not message.HasField("finish")
    assert not message.prefill_started


def test_finishing_by_eos_names_no_stop_match_even_for_token_id_zero() -> None:
    request = Request("key", [1, 2], 2, SamplingParameters(max_tokens=1))
    by_eos = output_to_proto(RequestOutput(request, finish=Finish(FinishReason.STOP)), 3)
    assert by_eos.finish.WhichOneof("stop_match") is None
    finish = Finish(FinishReason.STOP, stop_token_id=0)
    by_stop = output_to_proto(RequestOutput(request, finish=finish), 3)
    assert by_stop.finish.WhichOneof("stop_match") == "stop_token_id"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ContextLengthExceeded("x"), InvalidRequest, "context_length_exceeded"),
        (KvCapacityExceeded("x"), InvalidRequest, "kv_capacity"),
        (WaitingQueueFull("x"), Overloaded, "queue_full"),
        (SamplingFailed("x"), InternalError, "sampling_failed"),
        (NoTokenLeft("x"), InvalidRequest, "no_token_left"),
        (Unavailable("x", code="engine_draining"), Unavailable, "engine_draining"),
        (RuntimeError("x"), InternalError, "engine_failed"),
    ],
)
def test_what_ended_a_request_becomes_one_typed_error(
    error: Exception, kind: type[Exception], code: str
) -> None:
    shown = wire_error(error)
    assert type(shown) is kind
    assert shown.code == code
    request = Request("key", [1, 2], 2, SamplingParameters(max_tokens=1))
    output = RequestOutput(request, finish=Finish(FinishReason.ERROR, error=error))
    assert output_to_proto(output, 3).finish.error.code == code


def test_the_load_has_every_field() -> None:
    load = SchedulerLoad(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    message = load_to_proto(load)
    assert [getattr(message, name) for name in load._fields] == list(load)
    assert {field.name for field in message.DESCRIPTOR.fields} == set(load._fields)
