"""One sequence: the engine's outputs in, outputs with text out, and the one finish."""

from collections import deque
from collections.abc import Mapping, Sequence

from detok_svc.prompt_logprobs import PromptLogprobs
from detok_svc.text_assembler import TextAssembler
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2
from protos.wire.errors import InternalError, to_proto

_CANCELLED = common_pb2.Finish(reason=common_pb2.FINISH_REASON_CANCELLED)
_NATURAL_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class TextStream:
    """What the detokenizer knows of one sequence. A pure state machine: no I/O, no clock.

    An error flushes nothing: the outputs before it hold what is settled, so that the record can be
    continued elsewhere from the ids that they list, with text that goes on where theirs ends. All
    other ends flush.

    prompt_logprobs: None when those of the prompt are not to be sent.
    control_stops: stop strings that a control token spells, by the token's id.
    repeated: ids of the record, after those in the assembler, that the engine makes again.
    num_sent_tokens, num_sent_characters: of what the assembler settles next, how much was sent
    with the record.
    """

    def __init__(
        self,
        sequence_id: int,
        assembler: TextAssembler,
        control_stops: Mapping[int, str],
        repeated: Sequence[int] = (),
        num_sent_tokens: int = 0,
        num_sent_characters: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self._sequence_id = sequence_id
        self._assembler = assembler
        self._control_stops = control_stops
        self._repeated = deque(repeated)
        self._num_sent_tokens = num_sent_tokens
        self._num_sent_characters = num_sent_characters
        self._prompt_logprobs = prompt_logprobs
        self.finished = False

    def take(self, output: engine_pb2.Output) -> detok_pb2.Output | None:
        """The engine's next output as text; None when nothing has settled, or after the finish.

        A stop string finishes the sequence though the engine has not.
        """
        if self.finished:
            return None
        finish = output.finish if output.HasField("finish") else None
        if not self._add_tokens(output):
            finish = _diverged()
        if self._assembler.stop_string:
            result = self._end(None)
        elif finish is not None:
            result = self._end(finish)
        else:
            result = self._settled()
        if self._prompt_logprobs is not None:
            result.prompt_logprobs.extend(self._prompt_logprobs.take(output))
        if output.prefill_started:
            result.prefill_started = True
            result.num_cached_tokens = output.num_cached_tokens
        elif not (result.token_ids or result.text or self.finished or _has_logprobs(result)):
            return None
        return result

    def cancel(self) -> detok_pb2.Output:
        """Ends the sequence before the engine does; what was held is flushed."""
        assert not self.finished
        return self._end(_CANCELLED)

    def _add_tokens(self, output: engine_pb2.Output) -> bool:
        """Takes tokens up to a stop string; False when a repeated one is not what it was."""
        assembler = self._assembler
        logprobs = output.logprobs
        for index, token_id in enumerate(output.token_ids):
            if self._repeated and self._repeated.popleft() != token_id:
                return False
            assembler.add(token_id, logprobs[index] if logprobs else None)
            if assembler.stop_string:
                break
        return True

    def _end(self, finish: common_pb2.Finish | None) -> detok_pb2.Output:
        """The last output; `finish` is the engine's, or None if a stop string came first."""
        self.finished = True
        assembler = self._assembler
        is_error = finish is not None and finish.reason == common_pb2.FINISH_REASON_ERROR
        if not assembler.stop_string and not is_error:
            assembler.end()
        result = self._settled()
        if assembler.stop_string and (finish is None or finish.reason in _NATURAL_ENDS):
            result.finish.reason = common_pb2.FINISH_REASON_STOP
            result.finish.stop_string = assembler.stop_string
        else:
            assert finish is not None
            result.finish.CopyFrom(finish)
            self._name_control_stop(result.finish)
        return result

    def _name_control_stop(self, finish: common_pb2.Finish) -> None:
        """A control token that ended the sequence is the stop string which asked for it."""
        if finish.reason != common_pb2.FINISH_REASON_STOP:
            return
        if finish.HasField("stop_token_id"):
            token_id = finish.stop_token_id
        elif self._assembler.ending is not None:
            token_id, _ = self._assembler.ending
        else:
            return
        if token_id in self._control_stops:
            finish.stop_string = self._control_stops[token_id]

    def _settled(self) -> detok_pb2.Output:
        output = self._assembler.take(self._sequence_id)
        if self._num_sent_tokens:
            num_sent = min(self._num_sent_tokens, len(output.token_ids))
            self._num_sent_tokens -= num_sent
            del output.token_ids[:num_sent]
            del output.text_lengths[:num_sent]
            del output.logprob_counts[:num_sent]
        if self._num_sent_characters:
            num_sent = min(self._num_sent_characters, len(output.text))
            self._num_sent_characters -= num_sent
            output.text = output.text[num_sent:]
        return output


def _has_logprobs(output: detok_pb2.Output) -> bool:
    return bool(output.logprobs or output.prompt_logprobs)


def _diverged() -> common_pb2.Finish:
    error = InternalError(
        "The continued request did not repeat its own tokens.", code="resume_diverged"
    )
    return common_pb2.Finish(reason=common_pb2.FINISH_REASON_ERROR, error=to_proto(error))
