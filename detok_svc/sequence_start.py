"""Takes up a submitted record: the sequence's state from its ids, and what to ask of an engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from detok_svc.incremental_decoder import make_decoder
from detok_svc.prompt_logprobs import PromptLogprobs
from detok_svc.stop_strings import StopAutomata, StopStrings
from detok_svc.text_assembler import TextAssembler
from detok_svc.text_stream import TextStream
from detok_svc.token_bytes import TokenBytes
from detok_svc.token_logprobs import PendingLogprobs
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2
from protos.wire.errors import InvalidRequest
from protos.wire.logs import child_traceparent


@dataclass(frozen=True)
class SequenceStart:
    """A sequence that goes on, and what its engine is to be asked."""

    stream: TextStream
    engine_submit: engine_pb2.Submit


def start_sequence(
    submit: detok_pb2.Submit, tokens: TokenBytes, automata: StopAutomata
) -> SequenceStart | detok_pb2.Output:
    """Begins or continues a sequence; the finish alone, if its record has all its outputs.

    The outputs of a continued sequence hold only what was not settled with the record's ids; so
    also the end of one whose ids are complete. Where log-probabilities were asked for, those of the
    last ids may not have been settled yet, and the record does not have them: the engine is asked
    to make these tokens again, which gives the same tokens.

    Raises InvalidRequest for an empty stop string.
    """
    if not all(submit.stop):
        raise InvalidRequest("A stop string must not be empty.", param="stop")
    # A stop string that a control token spells makes the token a stop token to the engine, since
    # with skip_special_tokens its text never shows.
    control_stops = {
        token_id: stop
        for stop in submit.stop
        if (token_id := tokens.special_token_of(stop)) is not None
    }
    token_ids = submit.record.output_token_ids
    new_assembler = _assembler_factory(submit, tokens, automata, control_stops)
    assembler, num_listed = _replay(new_assembler(), token_ids)
    finish = _recorded_finish(submit.record, assembler)
    if finish is not None and not assembler.has_unsettled_logprobs:
        num_sent_tokens = len(token_ids) - num_listed
        ended = TextStream(
            submit.sequence_id, assembler, control_stops, num_sent_tokens=num_sent_tokens
        )
        last = ended.take(engine_pb2.Output(finish=finish))
        assert last is not None
        return last
    stream = TextStream(
        submit.sequence_id,
        assembler,
        control_stops,
        prompt_logprobs=_prompt_logprobs(submit.record, tokens),
    )
    num_settled = len(token_ids) - assembler.num_unsettled
    if repeated := token_ids[num_settled:]:
        num_characters = assembler.num_settled_characters
        assembler, num_listed = _replay(new_assembler(), token_ids[:num_settled])
        stream = TextStream(
            submit.sequence_id,
            assembler,
            control_stops,
            repeated,
            num_sent_tokens=len(token_ids) - num_listed,
            num_sent_characters=num_characters - assembler.num_settled_characters,
        )
    return SequenceStart(stream, _engine_submit(submit, num_settled, control_stops))


def _prompt_logprobs(
    record: common_pb2.GenerationRecord, tokens: TokenBytes
) -> PromptLogprobs | None:
    """None also where the record goes on: they were sent with its first token."""
    is_asked = record.sampling.prompt_logprobs and record.prompt_token_ids
    if not is_asked or record.output_token_ids:
        return None
    return PromptLogprobs(tokens, record.prompt_token_ids)


def _engine_submit(
    submit: detok_pb2.Submit, num_settled: int, control_stops: Iterable[int]
) -> engine_pb2.Submit:
    engine_submit = engine_pb2.Submit(
        request_id=submit.request_id,
        traceparent=child_traceparent(submit.traceparent),
        record=submit.record,
    )
    if submit.record.output_token_ids:
        engine_submit.record.sampling.prompt_logprobs = False
    del engine_submit.record.output_token_ids[num_settled:]
    stop_token_ids = engine_submit.record.sampling.stop_token_ids
    stop_token_ids.extend(sorted(set(control_stops) - set(stop_token_ids)))
    return engine_submit


def _assembler_factory(
    submit: detok_pb2.Submit,
    tokens: TokenBytes,
    automata: StopAutomata,
    control_stops: dict[int, str],
) -> Callable[[], TextAssembler]:
    sampling = submit.record.sampling
    includes_stop = submit.include_stop_str_in_output
    # Tokens that end the sequence and whose text the decoder is not to see.
    endings = dict.fromkeys(sampling.eos_token_ids, "")
    if not includes_stop:
        endings.update(dict.fromkeys(sampling.stop_token_ids, ""))
    for token_id, stop in control_stops.items():
        if submit.skip_special_tokens:
            endings[token_id] = stop if includes_stop else ""
        else:
            # Its text shows, and is found there.
            endings.pop(token_id, None)
    automaton = automata.automaton(tuple(submit.stop)) if submit.stop else None

    def new_assembler() -> TextAssembler:
        return TextAssembler(
            make_decoder(
                tokens,
                submit.skip_special_tokens,
                submit.record.prompt_token_ids,
                submit.shown_control_tokens,
            ),
            None if automaton is None else StopStrings(automaton),
            includes_stop=includes_stop,
            min_tokens=sampling.min_tokens,
            endings=endings,
            logprobs=PendingLogprobs(tokens) if sampling.logprobs else None,
        )

    return new_assembler


def _replay(assembler: TextAssembler, token_ids: Sequence[int]) -> tuple[TextAssembler, int]:
    """Brings `assembler` to its state after `token_ids`; also says how many of them it listed."""
    for token_id in token_ids:
        assembler.add(token_id)
        if assembler.stop_string or assembler.ending is not None:
            break
    return assembler, len(assembler.take(0).token_ids)


def _recorded_finish(
    record: common_pb2.GenerationRecord, assembler: TextAssembler
) -> common_pb2.Finish | None:
    """The engine's finish, if the record's outputs end the sequence; None if it goes on."""
    sampling = record.sampling
    finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_STOP)
    token_id = record.output_token_ids[-1] if record.output_token_ids else None
    if assembler.stop_string or token_id in sampling.eos_token_ids:
        return finish
    if token_id is not None and (assembler.ending or token_id in sampling.stop_token_ids):
        finish.stop_token_id = token_id
        return finish
    if len(record.output_token_ids) >= sampling.max_tokens:
        finish.reason = common_pb2.FINISH_REASON_LENGTH
        return finish
    return None
