"""Between the wire's messages and the objects of planning; requests are validated here."""

import math
from collections.abc import Collection, Hashable
from typing import Final

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
from protos.engine.v1 import engine_pb2
from protos.wire.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    TokenlineError,
    to_proto,
)
from protos.wire.sampling_range import LARGEST, SMALLEST_DIVISOR

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.TIMEOUT: common_pb2.FINISH_REASON_TIMEOUT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_MAX_LOGIT_BIAS: Final = 100.0
# A GPU's kernels are compiled ahead for no more of them, and beyond 16,384 cannot be at all.
MAX_TOP_LOGPROBS: Final = 32


def request_from_record(
    record: common_pb2.GenerationRecord, key: Hashable, vocab_size: int, now: float
) -> Request:
    """A request to schedule. Raises InvalidRequest that names the field at fault.

    now: in seconds, by the clock of the scheduler's deadlines.
    """
    if not record.prompt_token_ids:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    for name in ("prompt_token_ids", "output_token_ids"):
        _check_token_ids(name, max(getattr(record, name), default=0), vocab_size)
    return Request(
        key,
        [*record.prompt_token_ids, *record.output_token_ids],
        len(record.prompt_token_ids),
        _sampling_from_proto(record.sampling, vocab_size),
        record.priority,
        record.cache_salt,
        now + record.timeout_ms / 1000 if record.timeout_ms else math.inf,
    )


def _sampling_from_proto(
    sampling: common_pb2.SamplingParameters, vocab_size: int
) -> SamplingParameters:
    _check(sampling.max_tokens >= 1, "max_tokens", "must be at least 1")
    _check_number("temperature", sampling.temperature, low=0.0, high=LARGEST)
    _check_number("top_p", sampling.top_p, low=0.0, high=1.0, low_is_allowed=False)
    _check_number("min_p", sampling.min_p, low=0.0, high=1.0)
    _check_number(
        "repetition_penalty", sampling.repetition_penalty, low=SMALLEST_DIVISOR, high=LARGEST
    )
    for name in ("presence_penalty", "frequency_penalty"):
        _check_number(name, getattr(sampling, name), low=-LARGEST, high=LARGEST)
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    for name in ("top_logprobs", "top_prompt_logprobs"):
        _check(getattr(sampling, name) <= most, name, f"must be at most {most}")
    for name in ("stop_token_ids", "allowed_token_ids"):
        _check_token_ids(name, max(getattr(sampling, name), default=0), vocab_size)
    _check_logit_bias(sampling, vocab_size)
    _check_possible_tokens(sampling, vocab_size)
    return SamplingParameters(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        # Not checked: they are the model's own, and some models name ids they have no logit for.
        eos_token_ids=frozenset(sampling.eos_token_ids),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs if sampling.logprobs else 0,
        min_tokens=sampling.min_tokens,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
        allowed_token_ids=frozenset(sampling.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
        prompt_logprobs=sampling.prompt_logprobs,
        top_prompt_logprobs=sampling.top_prompt_logprobs if sampling.prompt_logprobs else 0,
        grammar=_grammar_from_proto(sampling.grammar),
    )


def _grammar_from_proto(grammar: common_pb2.Grammar) -> Grammar | None:
    """Whether it can be enforced is found out later, when it is compiled."""
    form = grammar.WhichOneof("form")
    return None if form is None else Grammar(GrammarForm(form), getattr(grammar, form))


def _check_logit_bias(sampling: common_pb2.SamplingParameters, vocab_size: int) -> None:
    biases = sampling.logit_bias
    _check_token_ids("logit_bias", max((entry.token_id for entry in biases), default=0), vocab_size)
    for entry in biases:
        _check_number("logit_bias", entry.bias, low=-_MAX_LOGIT_BIAS, high=_MAX_LOGIT_BIAS)


def _check_possible_tokens(sampling: common_pb2.SamplingParameters, vocab_size: int) -> None:
    """Checks what bans tokens, and that a first token stays possible."""
    words = sampling.bad_words
    for word in words:
        _check(bool(word.token_ids), "bad_words", "holds a word without tokens")
        _check_token_ids("bad_words", max(word.token_ids), vocab_size)
    _check(
        sampling.min_tokens <= sampling.max_tokens,
        "min_tokens",
        f"must be at most max_tokens, which is {sampling.max_tokens}",
    )
    allowed: Collection[int] = frozenset(sampling.allowed_token_ids) or range(vocab_size)
    banned = {word.token_ids[0] for word in words if len(word.token_ids) == 1}
    _check(_some_are_left(allowed, banned), "bad_words", "ban every token that is allowed")
    if sampling.min_tokens:
        banned |= {*sampling.eos_token_ids, *sampling.stop_token_ids}
        _check(
            _some_are_left(allowed, banned),
            "min_tokens",
            "needs an allowed token that is neither EOS nor a stop token",
        )


def _some_are_left(allowed: Collection[int], banned: set[int]) -> bool:
    return sum(token_id in allowed for token_id in banned) < len(allowed)


def _check(valid: bool, param: str, problem: str) -> None:
    if not valid:
        raise InvalidRequest(f"{param} {problem}.", param=param)


def _check_number(
    param: str,
    value: float,
    *,
    low: float,
    high: float,
    low_is_allowed: bool = True,
) -> None:
    above_low = value >= low if low_is_allowed else value > low
    _check(
        math.isfinite(value) and above_low and value <= high,
        param,
        f"must be a finite number in {'[' if low_is_allowed else '('}{low:g}, {high:g}], "
        f"got {value:g}",
    )


def _check_token_ids(param: str, highest: int, vocab_size: int) -> None:
    _check(
        highest < vocab_size,
        param,
        f"holds the token id {highest}, but the model's ids are below {vocab_size}",
    )


def output_to_proto(output: RequestOutput, sequence_id: int) -> engine_pb2.Output:
    message = engine_pb2.Output(sequence_id=sequence_id, token_ids=output.token_ids)
    message.logprobs.extend(map(_logprobs_to_proto, output.logprobs))
    message.prompt_logprobs.extend(map(_logprobs_to_proto, output.prompt_logprobs))
    if output.prefill_started:
        message.prefill_started = True
        message.num_cached_tokens = output.request.num_cached_tokens
    if output.finish is not None:
        message.finish.CopyFrom(_finish_to_proto(output.finish))
    return message


def _logprobs_to_proto(entry: TokenLogprobs) -> engine_pb2.TokenLogprobs:
    return engine_pb2.TokenLogprobs(
        logprob=entry.logprob,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def _finish_to_proto(finish: Finish) -> common_pb2.Finish:
    message = common_pb2.Finish(reason=_REASONS[finish.reason])
    if finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    if finish.error is not None:
        message.error.CopyFrom(to_proto(wire_error(finish.error)))
    return message


def wire_error(error: Exception) -> TokenlineError:
    """The error that a user is shown for what ended a request."""
    match error:
        case TokenlineError():
            return error
        case ContextLengthExceeded():
            return InvalidRequest(str(error), code="context_length_exceeded", param="max_tokens")
        case KvCapacityExceeded():
            return InvalidRequest(str(error), code="kv_capacity", param="max_tokens")
        case WaitingQueueFull():
            return Overloaded(str(error), code="queue_full")
        case NoTokenLeft():
            return InvalidRequest(f"No token could be sampled: {error}.", code="no_token_left")
        case SamplingFailed():
            return InternalError(f"No token could be sampled: {error}.", code="sampling_failed")
        case _:
            return InternalError("The engine failed on this request.", code="engine_failed")


def load_to_proto(load: SchedulerLoad) -> common_pb2.EngineLoad:
    return common_pb2.EngineLoad(**load._asdict())
