"""The whole line of a request on one screen: admit → encode → route → generate → record."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gateway.admission import Admission
from gateway.generation import Generation
from gateway.interruption import Interruptible
from gateway.job import Job, Prompt, choice_seed
from gateway.lanes import Lanes
from gateway.live_request import LiveRequest
from gateway.metrics import Metrics
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import InvalidRequest, RequestCancelled


class Pipeline:
    """Runs jobs over the lanes. Errors are TokenlineErrors, raised where the job stands."""

    def __init__(self, lanes: Lanes, admission: Admission, metrics: Metrics) -> None:
        self._lanes = lanes
        self._admission = admission
        self._metrics = metrics

    @asynccontextmanager
    async def run(self, job: Job) -> AsyncIterator[Generation]:
        """The job's sequences, started. Leaving the block early aborts them; the end is recorded,
        and so is every error on the way.
        """
        with self._admission.admit(job) as request:
            prompts = await self._encode(job, request)
            rooms = [_max_tokens(job, len(token_ids)) for token_ids in prompts]
            async with Generation(request, self._metrics) as generation:
                for token_ids, max_tokens in zip(prompts, rooms, strict=True):
                    self._start(job, token_ids, max_tokens, generation)
                request.note_route(generation.engines, generation.detoks)
                request.on_cancel(generation.abort)
                yield generation

    async def _encode(self, job: Job, request: LiveRequest) -> list[Sequence[int]]:
        """Token ids of each prompt; a cancel ends it."""
        async with Interruptible() as encoding:
            request.on_cancel(
                lambda: encoding.interrupt(
                    RequestCancelled("The request was cancelled.", code="request_cancelled")
                )
            )
            prompts = [await self._encode_prompt(job, prompt) for prompt in job.prompts]
        request.count_prompt_tokens(sum(map(len, prompts)))
        return prompts

    async def _encode_prompt(self, job: Job, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, tuple):
            return await self._lanes.encode(prompt)
        unknown = next((token for token in prompt if token >= job.model.vocab_size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"Token id {unknown} is outside the vocabulary of {job.model.vocab_size}.",
                code="invalid_value",
                param=job.prompt_param,
            )
        return prompt

    def _start(
        self, job: Job, token_ids: Sequence[int], max_tokens: int, generation: Generation
    ) -> None:
        """Begins every choice of one prompt, all on one engine: they share the prompt's KV."""
        engine, detok = self._lanes.route(token_ids, job.cache_salt)
        for choice in range(job.num_choices):
            submit = _submit(job, token_ids, generation.num_choices, max_tokens, engine.address)
            generation.start(submit, engine, detok, is_first_choice=choice == 0)


def _submit(
    job: Job, token_ids: Sequence[int], index: int, max_tokens: int, engine_address: str
) -> detok_pb2.Submit:
    """The record of choice `index`, complete: any engine can run it from here (DESIGN rule 6)."""
    record = common_pb2.GenerationRecord(
        prompt_token_ids=token_ids, sampling=job.sampling, cache_salt=job.cache_salt
    )
    record.sampling.seed = choice_seed(job.seed, index)
    record.sampling.max_tokens = max_tokens
    if not job.ignore_eos:
        record.sampling.eos_token_ids.extend(job.model.eos_token_ids)
    return detok_pb2.Submit(
        request_id=job.request_id,
        traceparent=job.traceparent,
        record=record,
        engine_address=engine_address,
        stop=job.stop,
        include_stop_str_in_output=job.include_stop_str_in_output,
        skip_special_tokens=job.skip_special_tokens,
    )


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
        return room
    if job.max_tokens > room:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. You asked for "
            f"{num_prompt_tokens + job.max_tokens} tokens ({num_prompt_tokens} in the prompt, "
            f"{job.max_tokens} for the answer); ask for at most {room}, or shorten the prompt.",
            code="context_length_exceeded",
            param=job.max_tokens_param,
        )
    return job.max_tokens
