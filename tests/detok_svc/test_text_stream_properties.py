"""One sequence, for any ids: grouping, breaks and a plain search of its text all agree."""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from detok_svc.incremental_decoder import make_decoder
from detok_svc.token_bytes import TokenBytes
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2
from protos.wire.stream_adapter import detok_adapter
from tests.fakes.detok_line import Answer, new_submit, run_in_process, token_bytes
from tests.fakes.engine_script import Script
from tests.fakes.tiny_tokenizers import IM_END, byte_fallback, byte_level

STOP = common_pb2.FINISH_REASON_STOP
BL, BF = token_bytes(byte_level()), token_bytes(byte_fallback())
BF_IDS = byte_fallback().get_vocab()


def grouped(token_ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """`token_ids` in steps that end at `cuts`."""
    borders = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    return [list(token_ids[a:b]) for a, b in itertools.pairwise(borders)]


# Any run of these is worth a look: bytes of characters, text, control tokens, an id with no token.
_BF_PIECES = ["<0xC3>", "<0xA9>", "<0x61>", "<0xFF>", "▁", "a", "▁a", "b", "</s>", "<unk>"]
_BL_PIECES = [*"aaabbc", *["ð", "Ł", "¦", "ľ", "Ã", "©", "ÿ"], "<|im_start|>", "<|im_end|>"]
TOKENIZERS: dict[str, tuple[TokenBytes, list[int], list[int]]] = {
    "BL": (BL, [byte_level().get_vocab()[piece] for piece in _BL_PIECES] + [999], [IM_END]),
    "BF": (BF, [BF_IDS[piece] for piece in _BF_PIECES] + [999], [BF_IDS["</s>"]]),
}
STOPS = ["a", "ab", "aab", "abab", "b a", "é", "🦜", "\ufffd", "éa", "<|im_start|>", "a<|im_end|>"]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[TokenBytes, list[int], dict[str, Any]]:
    tokens, pool, eos = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]
    token_ids = draw(st.lists(st.sampled_from(pool), max_size=20))
    fields = {
        "prompt": draw(st.lists(st.sampled_from(pool), max_size=4)),
        "eos": eos if draw(st.booleans()) else [],
        "stop_token_ids": draw(st.lists(st.sampled_from(pool), max_size=1)),
        "max_tokens": draw(st.integers(1, 25)),
        "stop": draw(st.lists(st.sampled_from(STOPS), max_size=3)),
        "top_logprobs": draw(st.sampled_from([None, 0, 2])),
        "skip_special_tokens": draw(st.booleans()),
        "include_stop_str_in_output": draw(st.booleans()),
    }
    return tokens, token_ids, fields


def numbered_logprobs(count: int) -> list[engine_pb2.TokenLogprobs]:
    """Different for each token, so that a mix-up is seen."""
    return [
        engine_pb2.TokenLogprobs(
            logprob=-index / 8, top_token_ids=[index % 250, 64], top_logprobs=[-index / 8, -9]
        )
        for index in range(count)
    ]


def script_of(token_ids: Sequence[int], cuts: Sequence[int]) -> Script:
    return Script(grouped(token_ids, cuts), logprobs=numbered_logprobs(len(token_ids)))


cut_lists = st.lists(st.integers(0, 30), max_size=20)
EVERY_TOKEN = list(range(30))


@given(sequences(), cut_lists)
@settings(deadline=None, max_examples=400)
def test_grouping_changes_nothing(
    case: tuple[TokenBytes, list[int], dict[str, Any]], cuts: list[int]
) -> None:
    tokens, token_ids, fields = case
    answer = run_in_process(new_submit(**fields), script_of(token_ids, cuts), tokens)
    single = run_in_process(new_submit(**fields), script_of(token_ids, EVERY_TOKEN), tokens)
    assert answer.summary == single.summary


@given(sequences(), cut_lists, st.integers(0, 30))
@settings(deadline=None, max_examples=500)
def test_a_record_continued_from_any_output_gives_exactly_the_rest(
    case: tuple[TokenBytes, list[int], dict[str, Any]], cuts: list[int], border: int
) -> None:
    tokens, token_ids, fields = case
    script = script_of(token_ids, cuts)
    whole = run_in_process(new_submit(**fields), script, tokens)
    assume(len(whole.outputs) > 1)
    before = Answer(whole.outputs[: border % (len(whole.outputs) - 1) + 1])
    resumed = new_submit(output=before.token_ids, **fields)
    after = run_in_process(resumed, script, tokens)
    assert Answer(before.outputs + after.outputs).summary == whole.summary


def join(outputs: Sequence[detok_pb2.Output]) -> detok_pb2.Output:
    joined = detok_pb2.Output()
    for output in outputs:
        detok_adapter().merge(joined, output)
    return joined


def cut(output: detok_pb2.Output, num_tokens: int) -> tuple[detok_pb2.Output, detok_pb2.Output]:
    """What came with the first tokens of `output`, and the rest with its finish."""
    num_characters = sum(output.text_lengths[:num_tokens])
    num_logprobs = sum(output.logprob_counts[:num_tokens])
    head = detok_pb2.Output(
        text=output.text[:num_characters],
        token_ids=output.token_ids[:num_tokens],
        logprobs=output.logprobs[:num_logprobs],
        text_lengths=output.text_lengths[:num_tokens],
        logprob_counts=output.logprob_counts[:num_tokens],
    )
    rest = detok_pb2.Output(
        text=output.text[num_characters:],
        token_ids=output.token_ids[num_tokens:],
        logprobs=output.logprobs[num_logprobs:],
        text_lengths=output.text_lengths[num_tokens:],
        logprob_counts=output.logprob_counts[num_tokens:],
        finish=output.finish,
    )
    return head, rest


@given(sequences(), cut_lists, st.integers(0, 30))
@settings(deadline=None, max_examples=800)
def test_an_output_cut_between_any_tokens_leaves_what_a_continued_record_sends(
    case: tuple[TokenBytes, list[int], dict[str, Any]], cuts: list[int], border: int
) -> None:
    tokens, token_ids, fields = case
    script = script_of(token_ids, cuts)
    answer = run_in_process(new_submit(**fields), script, tokens)
    whole = join(answer.outputs)
    assert len(whole.text_lengths) == len(whole.token_ids)
    assert len(whole.logprob_counts) == len(whole.token_ids) * (fields["top_logprobs"] is not None)
    head, rest = cut(whole, border % (len(whole.token_ids) + 1))
    # Only the last output can hold more than its tokens settled.
    sent_early = join(answer.outputs[:-1])
    assert sum(sent_early.text_lengths) == len(sent_early.text)
    assert sum(sent_early.logprob_counts) == len(sent_early.logprobs)
    resumed = new_submit(output=head.token_ids, **fields)
    continued = join(run_in_process(resumed, script, tokens).outputs)
    continued.ClearField("prefill_started")
    assert continued == rest


@given(sequences())
@settings(deadline=None, max_examples=400)
def test_stops_cut_where_a_plain_search_of_the_text_does(
    case: tuple[TokenBytes, list[int], dict[str, Any]],
) -> None:
    tokens, token_ids, fields = case
    fields |= {"eos": [], "stop_token_ids": [], "max_tokens": 1000}
    stops = [stop for stop in fields["stop"] if tokens.special_token_of(stop) is None]
    fields["stop"] = stops
    answer = run_in_process(new_submit(**fields), script_of(token_ids, EVERY_TOKEN), tokens)
    decoder = make_decoder(tokens, fields["skip_special_tokens"], fields["prompt"])
    texts = [text for token_id in token_ids for text in decoder.decode(token_id)]
    held, rest = decoder.flush()
    texts += held
    text = "".join(texts) + rest
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if not ends:
        assert (answer.text, answer.token_ids) == (text, token_ids)
        return
    end, _, stop = min(ends)
    assert answer.text == text[: end if fields["include_stop_str_in_output"] else end - len(stop)]
    lengths = [len("".join(texts[: count + 1])) for count in range(len(texts))]
    num_tokens = sum(length < end for length in lengths) + 1
    assert answer.token_ids == token_ids[:num_tokens]
    assert answer.finish == common_pb2.Finish(reason=STOP, stop_string=stop)
