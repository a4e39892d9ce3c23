"""One sequence: what is shown, what is listed, and how it finishes."""

from typing import Any

import pytest

from detok_svc.sequence_start import SequenceStart, start_sequence
from detok_svc.stop_strings import StopAutomata
from detok_svc.token_bytes import TokenBytes
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2
from protos.wire.errors import InvalidRequest, Unavailable
from tests.fakes.detok_line import new_submit, run_in_process, token_bytes, with_pieces
from tests.fakes.engine_script import Script, ScriptedSequence, one_per_step
from tests.fakes.tiny_tokenizers import IM_END, IM_START, byte_fallback, byte_level

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
CANCELLED, ERROR = common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_ERROR
BL, BF = token_bytes(byte_level()), token_bytes(byte_fallback())
BF_IDS = byte_fallback().get_vocab()


def ids(text: str) -> list[int]:
    return byte_level().encode(text).ids


def begin(submit: detok_pb2.Submit, tokens: TokenBytes = BL) -> SequenceStart:
    start = start_sequence(submit, tokens, StopAutomata())
    assert isinstance(start, SequenceStart)
    return start


def test_tokens_of_a_run_after_the_stop_string_are_not_listed() -> None:
    # The run is known to be text only at its end, which comes after the stop string.
    token_ids = [BF_IDS[piece] for piece in ("<0xC3>", "<0xA9>", "<0x61>", "<0x62>", "b")]
    answer = run_in_process(new_submit(stop=["éa"]), one_per_step(token_ids), BF)
    assert (answer.text, answer.token_ids) == ("", token_ids[:3])


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_eos_is_listed_and_never_shown(skip_special_tokens: bool) -> None:
    submit = new_submit(eos=[IM_END], top_logprobs=0, skip_special_tokens=skip_special_tokens)
    token_ids = [*ids("a"), IM_START, IM_END]
    answer = run_in_process(submit, one_per_step(token_ids), BL)
    assert answer.text == ("a" if skip_special_tokens else "a<|im_start|>")
    assert answer.token_ids == token_ids
    # A control token that shows no text is none the less a token of the answer; EOS is not.
    assert answer.shown_ids == token_ids[:2]
    assert answer.finish == common_pb2.Finish(reason=STOP)


@pytest.mark.parametrize("includes_stop", [True, False])
def test_a_stop_token_shows_only_if_stops_are_included(includes_stop: bool) -> None:
    (token_id,) = ids("b")
    submit = new_submit(
        stop_token_ids=[token_id], top_logprobs=0, include_stop_str_in_output=includes_stop
    )
    answer = run_in_process(submit, one_per_step(ids("abc")), BL)
    assert answer.text == ("ab" if includes_stop else "a")
    assert answer.token_ids == ids("ab")
    assert answer.shown_ids == ids("ab" if includes_stop else "a")
    assert answer.finish == common_pb2.Finish(reason=STOP, stop_token_id=token_id)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("includes_stop", [True, False])
@pytest.mark.parametrize("eos", [[], [IM_END]])
def test_the_text_of_a_control_token_is_a_stop_string(
    skip_special_tokens: bool, includes_stop: bool, eos: list[int]
) -> None:
    submit = new_submit(
        stop=["<|im_end|>", "zz"],
        eos=eos,
        top_logprobs=0,
        skip_special_tokens=skip_special_tokens,
        include_stop_str_in_output=includes_stop,
    )
    assert list(begin(submit).engine_submit.record.sampling.stop_token_ids) == [IM_END]
    token_ids = [*ids("az"), IM_END]
    answer = run_in_process(submit, one_per_step([*token_ids, *ids("b")]), BL)
    assert answer.text == ("az<|im_end|>" if includes_stop else "az")
    assert answer.token_ids == token_ids
    assert answer.shown_ids == (token_ids if includes_stop else token_ids[:2])
    assert answer.finish == common_pb2.Finish(reason=STOP, stop_string="<|im_end|>")


def test_a_control_tokens_text_spelled_by_other_tokens_is_a_stop_too() -> None:
    spelled = [*ids("a"), *(ids(character)[0] for character in "<|im_end|>b")]
    answer = run_in_process(new_submit(stop=["<|im_end|>"]), one_per_step(spelled), BL)
    assert answer.text == "a"
    assert answer.finish.stop_string == "<|im_end|>"


def test_a_stop_string_beats_the_engines_finish_of_the_same_token() -> None:
    answer = run_in_process(new_submit(stop=["b"], max_tokens=2), one_per_step(ids("abc")), BL)
    assert answer.finish == common_pb2.Finish(reason=STOP, stop_string="b")


def test_logprobs_come_with_the_text_and_not_for_trimmed_tokens() -> None:
    tokenizer, (uvw, x, q) = with_pieces("uv w", "x", "q")
    submit = new_submit(stop=["wx y", "q"], top_logprobs=0)
    answer = run_in_process(submit, one_per_step([uvw, x, *ids("a"), q]), token_bytes(tokenizer))
    assert answer.deltas == ["uv ", "", "wxa", ""]
    assert answer.token_ids == [uvw, x, *ids("a"), q]
    assert [len(output.logprobs) for output in answer.outputs] == [1, 0, 2, 0]
    assert answer.shown_ids == [uvw, x, *ids("a")]


def test_logprob_entries_have_the_tokens_own_text_and_bytes() -> None:
    logprobs = engine_pb2.TokenLogprobs(
        logprob=-1, top_token_ids=[999, IM_END], top_logprobs=[-1, -9999]
    )
    script = Script([[172, 253, 99, 250]], logprobs=[logprobs] * 4)
    answer = run_in_process(new_submit(top_logprobs=2), script, BL)
    assert [entry.token.text for entry in answer.logprobs] == [r"\xf0", r"\x9f", r"\xa6", r"\x9c"]
    assert b"".join(entry.token.text_bytes for entry in answer.logprobs).decode() == "🦜"
    unknown, control = answer.logprobs[0].top
    assert (unknown.token_id, unknown.text, unknown.text_bytes) == (999, "", b"")
    assert (control.text, control.text_bytes) == ("<|im_end|>", b"<|im_end|>")
    assert control.logprob == -9999


def test_a_token_cut_off_after_a_broken_character_is_not_shown() -> None:
    answer = run_in_process(
        new_submit(stop=["a"], top_logprobs=0), one_per_step([172, *ids("a")]), BL
    )
    assert (answer.text, answer.shown_ids) == ("\ufffd", [172])


@pytest.mark.parametrize(("text", "flushed"), [("ab", "ab"), ("a🦜", "a🦜")])
def test_cancel_flushes_what_is_held(text: str, flushed: str) -> None:
    start = begin(new_submit(stop=["bc", "🦜!"], sequence_id=7))
    first = start.stream.take(engine_pb2.Output(token_ids=ids(text)))
    last = start.stream.cancel()
    assert first is not None and first.text + last.text == flushed
    assert last.finish == common_pb2.Finish(reason=CANCELLED)
    assert last.sequence_id == 7
    late = engine_pb2.Output(token_ids=ids("x"), finish=common_pb2.Finish(reason=CANCELLED))
    assert start.stream.finished and start.stream.take(late) is None


def test_an_error_keeps_what_is_not_settled_for_the_continuation() -> None:
    error = Unavailable("Lost.", code="engine_lost")
    broken = run_in_process(
        new_submit(stop=["bc"]), one_per_step(ids("abd"), error_after=2, error=error), BL
    )
    assert (broken.text, broken.token_ids) == ("a", ids("ab"))
    assert broken.finish.reason == ERROR and broken.finish.error.code == "engine_lost"
    rest = run_in_process(new_submit(stop=["bc"], output=ids("ab")), one_per_step(ids("abd")), BL)
    assert (rest.text, rest.token_ids) == ("bd", ids("d"))


def test_prefill_is_reported_though_there_is_no_token_yet() -> None:
    start = begin(new_submit())
    output = start.stream.take(engine_pb2.Output(prefill_started=True, num_cached_tokens=16))
    assert output is not None and output.prefill_started and output.num_cached_tokens == 16
    assert start.stream.take(engine_pb2.Output()) is None


@pytest.mark.parametrize(
    ("output", "fields", "finish"),
    [
        (ids("ab"), {"max_tokens": 2}, common_pb2.Finish(reason=LENGTH)),
        ([*ids("a"), IM_END], {"eos": [IM_END]}, common_pb2.Finish(reason=STOP)),
        (ids("ab"), {"stop": ["b"]}, common_pb2.Finish(reason=STOP, stop_string="b")),
        (
            [*ids("a"), IM_END],
            {"stop": ["<|im_end|>"]},
            common_pb2.Finish(reason=STOP, stop_string="<|im_end|>"),
        ),
        (
            ids("ab"),
            {"stop_token_ids": ids("b")},
            common_pb2.Finish(reason=STOP, stop_token_id=ids("b")[0]),
        ),
    ],
)
@pytest.mark.parametrize("includes_stop", [True, False])
def test_a_complete_record_needs_no_engine(
    output: list[int], fields: dict[str, Any], finish: common_pb2.Finish, includes_stop: bool
) -> None:
    submit = new_submit(
        output=output, sequence_id=3, include_stop_str_in_output=includes_stop, **fields
    )
    end = start_sequence(submit, BL, StopAutomata())
    # A control token that ends the text shows with the end itself.
    text = "<|im_end|>" if includes_stop and fields.get("stop") == ["<|im_end|>"] else ""
    assert end == detok_pb2.Output(sequence_id=3, text=text, finish=finish)


def test_a_complete_record_gives_the_text_that_only_the_end_settles() -> None:
    submit = new_submit(output=[*ids("a"), 172], max_tokens=2, stop=["ab"])
    end = start_sequence(submit, BL, StopAutomata())
    assert end == detok_pb2.Output(text="a\ufffd", finish=common_pb2.Finish(reason=LENGTH))


def test_held_text_is_counted_with_the_token_that_settles_it_or_with_the_finish() -> None:
    submit = new_submit(stop=["bc"], top_logprobs=0, max_tokens=4)
    answer = run_in_process(submit, one_per_step(ids("abab")), BL)
    assert [list(output.text_lengths) for output in answer.outputs] == [[1], [0], [2], [0]]
    assert [list(output.logprob_counts) for output in answer.outputs] == [[1], [0], [2], [0]]
    assert answer.outputs[-1].text == "b" and len(answer.outputs[-1].logprobs) == 1


def test_a_continuation_that_does_not_repeat_its_tokens_is_an_error() -> None:
    # The log-probabilities of a half character are not settled, so its token is asked for again.
    start = begin(new_submit(output=[64, 172], top_logprobs=0))
    assert list(start.engine_submit.record.output_token_ids) == [64]
    engine = ScriptedSequence(start.engine_submit, one_per_step([64, 65]))
    engine_output = engine.next_output()
    assert engine_output is not None
    output = start.stream.take(engine_output)
    assert output is not None and output.finish.error.code == "resume_diverged"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        start_sequence(new_submit(stop=["a", ""]), BL, StopAutomata())
    assert refused.value.param == "stop"
