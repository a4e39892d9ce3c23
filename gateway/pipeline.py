"""The whole line of a request on one screen: admit → encode → route → generate → record."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from gateway.admission import Admission
from gateway.bad_words import banned_sequences
from gateway.generation import Generation, timed_out
from gateway.interruption import Interruptible
from gateway.job import Job, choice_seed
from gateway.lanes import Lanes
from gateway.live_request import LiveRequest
from gateway.metrics import Metrics
from gateway.output_log import OutputLog, gathered
from gateway.run_batches import RunHead
from gateway.seat import Seat
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.tokenizer.v1 import tokenizer_pb2
from protos.wire.errors import InvalidRequest, RequestCancelled

# By so much the line's deadline is later than the job's own: what a timeout becomes is for this
# gateway to say, which knows whether a token was sent.
_DEADLINE_SLACK_SECONDS: Final = 0.25


class _Encoded(NamedTuple):
    """Token ids of each prompt, and the token sequences of the bad words.

    `in_reasoning`: the prompt, a chat, ends where the model's thoughts begin.
    """

    prompts: list[Sequence[int]]
    in_reasoning: bool
    bad_words: list[common_pb2.TokenSequence]


class Pipeline:
    """Runs jobs over the lanes. Errors are TokenlineErrors, raised where the job stands."""

    def __init__(self, lanes: Lanes, admission: Admission, metrics: Metrics) -> None:
        self._lanes = lanes
        self._admission = admission
        self._metrics = metrics

    async def run(self, job: Job, log: OutputLog, seat: Seat) -> None:
        """Carries the job out, and logs what its choices gain, until all have ended.

        Cancelling it aborts them. The end is recorded, and so is every error on the way. A run that
        was taken over goes on from what its log holds.
        """
        with (
            self._admission.admit(job, seat) as request,
            _called_after(job.seconds_left, request.time_out),
        ):
            request.resume(sum(log.num_tokens), log.num_cached_tokens)
            encoded = await self._encode(job, request)
            rooms = [_max_tokens(job, len(token_ids)) for token_ids in encoded.prompts]
            num_prompt_tokens = sum(map(len, encoded.prompts))
            request.count_prompt_tokens(num_prompt_tokens)
            log.begin(
                RunHead(num_prompt_tokens=num_prompt_tokens, in_reasoning=encoded.in_reasoning)
            )
            async with Generation(
                request,
                self._metrics,
                log,
                prompt_only=job.max_tokens == 0,
                reading=job.reading,
                in_reasoning=encoded.in_reasoning,
            ) as generation:
                earlier = gathered(log)
                async with self._admission.turn(
                    request, request.record.num_prompt_tokens, sum(rooms) * job.num_choices
                ):
                    for token_ids, max_tokens in zip(encoded.prompts, rooms, strict=True):
                        record = _record(job, token_ids, max_tokens, encoded.bad_words)
                        self._start(job, record, generation, earlier)
                seat.on_start()
                request.note_route(generation.engines, generation.detoks)
                request.on_cancel(generation.abort)
                request.on_timeout(generation.time_out)
                with _with_the_clients_names(job):
                    await generation.until_ended()

    def note_refusal(self, endpoint: str) -> None:
        """A request of `endpoint` was wrong before there was a job to run."""
        self._metrics.note_refusal(endpoint)

    async def _encode(self, job: Job, request: LiveRequest) -> _Encoded:
        """What the tokenizer makes of the job; a cancel or a timeout ends it."""
        async with Interruptible() as encoding:
            request.on_cancel(
                lambda: encoding.interrupt(
                    RequestCancelled("The request was cancelled.", code="request_cancelled")
                )
            )
            if not request.record.num_output_tokens:
                request.on_timeout(lambda: encoding.interrupt(timed_out()))
            responses = [
                tokenizer_pb2.EncodeResponse(token_ids=prompt)
                if isinstance(prompt, tuple)
                else await self._lanes.encode(prompt)
                for prompt in job.prompts
            ]
            bad_words = await banned_sequences(
                job.bad_words, job.model.vocab_size, self._lanes.encode
            )
        prompts: list[Sequence[int]] = [response.token_ids for response in responses]
        in_reasoning = any(response.in_reasoning for response in responses)
        return _Encoded(prompts, in_reasoning, bad_words)

    def _start(
        self,
        job: Job,
        record: common_pb2.GenerationRecord,
        generation: Generation,
        earlier: Mapping[int, detok_pb2.Output],
    ) -> None:
        """Begins every choice of one prompt, all on one engine: they share the prompt's KV.

        `earlier`: what choices have already, by index; they go on after it.
        """
        router = self._lanes.router(record.prompt_token_ids, job.cache_salt, job.model.fingerprint)
        for choice in range(job.num_choices):
            submit = _submit(job, record, generation.num_choices)
            generation.start(
                submit,
                router,
                is_first_choice=choice == 0,
                deadline=_deadline(job),
                had=earlier.get(generation.num_choices),
            )


def _deadline(job: Job) -> float | None:
    """When, on the event loop's clock, the line may drop the job's sequences."""
    if job.seconds_left is None:
        return None
    return asyncio.get_running_loop().time() + job.seconds_left + _DEADLINE_SLACK_SECONDS


@contextmanager
def _called_after(seconds: float | None, action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` if the block takes so long; None for never."""
    if seconds is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(seconds, action)
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _with_the_clients_names(job: Job) -> Iterator[None]:
    """Errors of the line name the field that the client knows."""
    try:
        yield
    except InvalidRequest as error:
        if error.param not in ("", "grammar"):
            raise
        raise InvalidRequest(error.message, code=error.code, param=job.grammar_param) from error


def _record(
    job: Job,
    token_ids: Sequence[int],
    max_tokens: int,
    bad_words: Sequence[common_pb2.TokenSequence],
) -> common_pb2.GenerationRecord:
    """What the choices of one prompt have in common: all but the seed."""
    record = common_pb2.GenerationRecord(
        prompt_token_ids=token_ids,
        sampling=job.sampling,
        priority=job.priority,
        cache_salt=job.cache_salt,
    )
    record.sampling.max_tokens = max_tokens
    record.sampling.bad_words.extend(bad_words)
    if not job.ignore_eos:
        record.sampling.eos_token_ids.extend(job.model.eos_token_ids)
    return record


def _submit(job: Job, record: common_pb2.GenerationRecord, index: int) -> detok_pb2.Submit:
    """Choice `index`, complete: its record is all that an engine needs."""
    submit = detok_pb2.Submit(
        request_id=job.request_id,
        traceparent=job.traceparent,
        record=record,
        stop=job.stop,
        include_stop_str_in_output=job.include_stop_str_in_output,
        skip_special_tokens=job.skip_special_tokens,
        shown_control_tokens=job.shown_control_tokens,
    )
    submit.record.sampling.seed = choice_seed(job.seed, index)
    return submit


def _max_tokens(job: Job, num_prompt_tokens: int) -> int:
    """The most tokens that the prompt's choices may sample. Raises InvalidRequest."""
    limit = job.model.max_model_len
    room = limit - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequest(
            "The prompt has no tokens.", code="invalid_value", param=job.prompt_param
        )
    if room < 1:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. Your prompt has "
            f"{num_prompt_tokens} tokens, which leaves no room for an answer; shorten it.",
            code="context_length_exceeded",
            param=job.prompt_param,
        )
    if job.max_tokens is None:
        max_tokens = min(room, job.model.generation_defaults.max_new_tokens or room)
    elif job.max_tokens > room:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. You asked for "
            f"{num_prompt_tokens + job.max_tokens} tokens ({num_prompt_tokens} in the prompt, "
            f"{job.max_tokens} for the answer); ask for at most {room}, or shorten the prompt.",
            code="context_length_exceeded",
            param=job.max_tokens_param,
        )
    else:
        max_tokens = job.max_tokens
    if job.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` is {job.sampling.min_tokens}, but the answer has at most {max_tokens} "
            "tokens.",
            code="invalid_value",
            param="min_tokens",
        )
    # An engine computes a prompt only to sample a token after it.
    return max(1, max_tokens)
