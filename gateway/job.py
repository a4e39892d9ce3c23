"""What a client asked for, free of HTTP: the input of the pipeline."""

import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.call import Call
from gateway.chat_reducer import TextReading
from gateway.field_checks import check_in_vocabulary
from gateway.generation_fields import GenerationFields
from gateway.lanes import LineModel
from gateway.prompt_size import check_prompt_bytes
from gateway.response_format import structure_of
from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2

_SEED_BYTES: Final = 8
_KEY_BYTES: Final = 16

# Text still to be encoded, or token ids as the client gave them.
Prompt = tokenizer_pb2.EncodeRequest | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. `sampling` lacks what the pipeline adds: seed, max_tokens, EOS and bad words.

    Choice i of prompt j has the index j * num_choices + i. `max_tokens` None means the model's
    default, or all the room that the prompt leaves; 0, that the prompt is to be computed and
    nothing more. `timeout_seconds` is for the whole request, which began at `started_at` in unix
    seconds; None for no limit. `reading`: how the text of a choice is to be read. `prompt_param`
    and `max_tokens_param` name the fields for errors, and `grammar_param` the one that asks for
    `sampling.grammar`. `shown_control_tokens`: those that stay in the text in any case. `tenant`:
    whose API key it carries; empty where no keys are asked for. `is_detached`: it goes on whether
    anybody reads or not.
    """

    request_id: str
    traceparent: str
    endpoint: str
    model: LineModel
    streams: bool
    prompts: tuple[Prompt, ...]
    prompt_param: str
    num_choices: int
    sampling: common_pb2.SamplingParameters
    seed: int
    max_tokens: int | None
    max_tokens_param: str
    stop: tuple[str, ...]
    bad_words: tuple[str, ...]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    priority: int
    cache_salt: str
    started_at: float
    timeout_seconds: float | None
    reading: TextReading
    grammar_param: str = ""
    shown_control_tokens: tuple[str, ...] = ()
    tenant: str = ""
    is_detached: bool = False

    @property
    def seconds_left(self) -> float | None:
        """Of `timeout_seconds`, by the clocks of this gateway and of the one that began."""
        if self.timeout_seconds is None:
            return None
        return max(0.0, self.started_at + self.timeout_seconds - time.time())

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices


def job_from(
    body: GenerationFields,
    call: Call,
    model: LineModel,
    *,
    endpoint: str,
    prompts: Sequence[Prompt],
    prompt_param: str,
) -> Job:
    """The job that a checked body asks for. Raises InvalidRequest for ids that are no tokens."""
    for prompt in prompts:
        if isinstance(prompt, tuple):
            # What comes behind is too much in any case.
            check_in_vocabulary(prompt[: model.max_model_len], model.vocab_size, prompt_param)
        else:
            check_prompt_bytes(prompt.ByteSize(), model.max_model_len, prompt_param)
    max_tokens_param, max_tokens = body.token_limit
    sampling = body.sampling(model.vocab_size, model.generation_defaults)
    structure = structure_of(body)
    if structure is not None:
        sampling.grammar.CopyFrom(structure.grammar)
    return Job(
        request_id=call.request_id,
        traceparent=call.traceparent,
        endpoint=endpoint,
        model=model,
        streams=body.streams,
        prompts=tuple(prompts),
        prompt_param=prompt_param,
        num_choices=body.num_choices,
        sampling=sampling,
        seed=call.seed if body.seed is None else body.seed,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        stop=body.stop_strings,
        bad_words=tuple(body.bad_words or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skips_special_tokens,
        # In the API lower values run first, on the line higher ones.
        priority=-(body.priority or 0),
        cache_salt=_cache_salt(body.cache_salt or "", call.tenant),
        started_at=call.started_at,
        timeout_seconds=body.timeout,
        reading=TextReading(),
        grammar_param=structure.param if structure is not None else "",
        tenant=call.tenant,
    )


def _cache_salt(given: str, tenant: str) -> str:
    """Prompts of different API keys share no cache block, whatever salts they choose."""
    return f"{tenant}:{given}" if tenant else given


def retry_keys(job: Job) -> tuple[bytes, bytes]:
    """What tells that a request comes again: by its id, and by what it asks.

    A seed may have been drawn here, so that it says nothing.
    """
    what = common_pb2.SamplingParameters()
    what.CopyFrom(job.sampling)
    what.ClearField("seed")
    asked = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in (
        repr((job.tenant, job.endpoint, job.num_choices, job.max_tokens, job.stop)).encode(),
        what.SerializeToString(deterministic=True),
        *(
            array("Q", prompt).tobytes()
            if isinstance(prompt, tuple)
            else prompt.SerializeToString(deterministic=True)
            for prompt in job.prompts
        ),
    ):
        asked.update(len(part).to_bytes(8, "little") + part)
    named = repr((job.tenant, job.request_id)).encode()
    return hashlib.blake2b(named, digest_size=_KEY_BYTES).digest(), asked.digest()


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for choice 0, else a hash of both.

    Signed 64-bit in and out.
    """
    if index == 0:
        return seed
    text = seed.to_bytes(_SEED_BYTES, "little", signed=True) + index.to_bytes(_SEED_BYTES, "little")
    digest = hashlib.blake2b(text, digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)
