"""What a scripted engine says for one Submit, step by step, with the endings of a real engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.wire.errors import InternalError, TokenlineError, to_proto


@dataclass(frozen=True)
class Script:
    """What one sequence emits: `steps`, then `ending`.

    Each step is a list of token ids that one Output carries. A request that resumes (its record
    holds outputs) gets the script from that token on. EOS, stop tokens and max_tokens of the
    request end it earlier, as in a real engine.

    logprobs: one per token of the whole script; made up when the request asks and none are given.
    delay_seconds: before each step. error_after: that many tokens, then `error`.
    ending: the reason after the last step; None runs on silently until an abort.
    """

    steps: Sequence[Sequence[int]] = ()
    logprobs: Sequence[engine_pb2.TokenLogprobs] = ()
    delay_seconds: float = 0.0
    error_after: int | None = None
    error: TokenlineError = field(default_factory=lambda: InternalError("The scripted fault."))
    ending: common_pb2.FinishReason.ValueType | None = common_pb2.FINISH_REASON_STOP
    num_cached_tokens: int = 0


def one_per_step(token_ids: Sequence[int], **script_fields: Any) -> Script:
    """A script whose every step carries one token."""
    return Script(steps=[[token_id] for token_id in token_ids], **script_fields)


class ScriptedSequence:
    """One live sequence: turns a Submit and its Script into the Outputs of successive steps."""

    def __init__(self, submit: engine_pb2.Submit, script: Script) -> None:
        self.submit = submit
        self.script = script
        self.due = 0.0
        self.finished = False
        sampling = submit.record.sampling
        self._max_tokens = sampling.max_tokens
        self._eos = frozenset(sampling.eos_token_ids)
        self._stops = frozenset(sampling.stop_token_ids)
        self._num_tokens = len(submit.record.output_token_ids)
        self._steps = self._remaining_steps(self._num_tokens)
        self._started = False

    def next_output(self) -> engine_pb2.Output | None:
        """The output of the next step; None when the script has only silence left."""
        assert not self.finished
        output = engine_pb2.Output(sequence_id=self.submit.sequence_id)
        if not self._started:
            self._started = True
            output.prefill_started = True
            output.num_cached_tokens = self.script.num_cached_tokens
            if self.submit.record.sampling.prompt_logprobs:
                output.prompt_logprobs.extend(self._prompt_logprobs())
        if self._must_fail():
            self._finish_with_error(output)
            return output
        step = next(self._steps, None)
        if step is None:
            if self.script.ending is None:
                return output if output.prefill_started else None
            output.finish.reason = self.script.ending
            self.finished = True
            return output
        for token_id in step:
            self._append(output, token_id)
            if self.finished or self._must_fail():
                break
        if not self.finished and self._is_last_step():
            output.finish.reason = self.script.ending  # type: ignore[assignment]
            self.finished = True
        return output

    def _remaining_steps(self, num_skipped: int) -> Iterator[list[int]]:
        self._num_scripted = sum(len(step) for step in self.script.steps)
        for step in self.script.steps:
            rest = list(step[num_skipped:])
            num_skipped = max(0, num_skipped - len(step))
            if rest or not step:
                yield rest

    def _is_last_step(self) -> bool:
        return (
            self.script.ending is not None
            and self.script.error_after is None
            and self._num_tokens >= self._num_scripted
        )

    def _must_fail(self) -> bool:
        limit = self.script.error_after
        return limit is not None and self._num_tokens >= limit

    def _finish_with_error(self, output: engine_pb2.Output) -> None:
        output.finish.reason = common_pb2.FINISH_REASON_ERROR
        output.finish.error.CopyFrom(to_proto(self.script.error))
        self.finished = True

    def _append(self, output: engine_pb2.Output, token_id: int) -> None:
        output.token_ids.append(token_id)
        if self.submit.record.sampling.logprobs:
            output.logprobs.append(self._logprobs(token_id))
        self._num_tokens += 1
        if token_id in self._eos:
            output.finish.reason = common_pb2.FINISH_REASON_STOP
        elif token_id in self._stops:
            output.finish.reason = common_pb2.FINISH_REASON_STOP
            output.finish.stop_token_id = token_id
        elif self._num_tokens >= self._max_tokens:
            output.finish.reason = common_pb2.FINISH_REASON_LENGTH
        self.finished = output.HasField("finish")

    def _prompt_logprobs(self) -> list[engine_pb2.TokenLogprobs]:
        count = self.submit.record.sampling.top_prompt_logprobs
        return [_made_up(token_id, count) for token_id in self.submit.record.prompt_token_ids[1:]]

    def _logprobs(self, token_id: int) -> engine_pb2.TokenLogprobs:
        if self.script.logprobs:
            return self.script.logprobs[self._num_tokens]
        return _made_up(token_id, self.submit.record.sampling.top_logprobs)


def _made_up(token_id: int, count: int) -> engine_pb2.TokenLogprobs:
    """Log-probabilities with `token_id` as the likeliest of `count`."""
    others = [other for other in range(count + 1) if other != token_id]
    return engine_pb2.TokenLogprobs(
        logprob=-0.25,
        top_token_ids=[token_id, *others][:count],
        top_logprobs=[-0.25 - rank for rank in range(count)],
    )
