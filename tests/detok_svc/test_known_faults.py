"""Faults that other servers had, in the detokenizer: in process and over gRPC, grouped or not."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from tokenizers import Tokenizer

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import InternalError
from tests.fakes.detok_line import (
    Answer,
    detok_line,
    new_submit,
    run_in_process,
    token_bytes,
    with_pieces,
)
from tests.fakes.engine_script import Script
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_tokenizers import IM_END, byte_fallback, byte_level
from tests.fakes.waiting import until

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
Runner = Callable[[Tokenizer, Script, detok_pb2.Submit], Awaitable[Answer]]


async def in_process(tokenizer: Tokenizer, script: Script, submit: detok_pb2.Submit) -> Answer:
    return run_in_process(submit, script, token_bytes(tokenizer))


async def over_grpc(tokenizer: Tokenizer, script: Script, submit: detok_pb2.Submit) -> Answer:
    async with detok_line(token_bytes(tokenizer), ScriptedEngine(script)) as line:
        return await line.generate(submit)


def one_by_one(token_ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


def all_at_once(token_ids: Sequence[int]) -> list[list[int]]:
    return [list(token_ids)]


runners = pytest.mark.parametrize("run", [in_process, over_grpc])
groupings = pytest.mark.parametrize("grouped", [one_by_one, all_at_once])
Grouping = Callable[[Sequence[int]], list[list[int]]]


@pytest.mark.parametrize("text", ["a🦜b", "한", "ñ", "\U0001f469\u200d\U0001f680", "x한ñ🦜"])
@runners
@groupings
async def test_bug_01_characters_over_several_tokens_come_out_whole(
    run: Runner, grouped: Grouping, text: str
) -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode(text).ids
    answer = await run(tokenizer, Script(grouped(token_ids)), new_submit())
    assert answer.text == text == tokenizer.decode(token_ids)
    assert all("\ufffd" not in delta for delta in answer.deltas)
    assert answer.token_ids == token_ids


async def test_bug_01_a_character_is_sent_with_its_last_token() -> None:
    token_ids = [64, 172, 253, 99, 250, 65]
    answer = await in_process(byte_level(), Script(one_by_one(token_ids)), new_submit())
    assert answer.deltas == ["a", "", "", "", "🦜", "b"]
    assert len(answer.token_ids) == 6


@runners
@groupings
async def test_bug_06_strip_drops_exactly_one_blank(run: Runner, grouped: Grouping) -> None:
    tokenizer = byte_fallback()
    token_ids = [tokenizer.token_to_id(piece) for piece in ("▁a", "▁b")]
    answer = await run(tokenizer, Script(grouped(token_ids)), new_submit())
    assert answer.text == "a b" == tokenizer.decode(token_ids)


@runners
@groupings
async def test_bug_06_byte_level_keeps_the_first_blank(run: Runner, grouped: Grouping) -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode(" hi").ids
    answer = await run(tokenizer, Script(grouped(token_ids)), new_submit())
    assert answer.text == " hi" == tokenizer.decode(token_ids)


@runners
async def test_bug_06_a_blank_after_the_prompt_is_kept(run: Runner) -> None:
    tokenizer = byte_fallback()
    prompt, output = tokenizer.token_to_id("a"), tokenizer.token_to_id("▁b")
    answer = await run(tokenizer, Script([[output]]), new_submit(prompt=[prompt]))
    assert answer.text == " b"


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
@runners
async def test_bug_06_blanks_between_sentences_are_kept(
    run: Runner, make_tokenizer: Callable[[], Tokenizer]
) -> None:
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode("Yes. No. Maybe").ids
    answer = await run(tokenizer, Script(one_by_one(token_ids)), new_submit())
    assert answer.text == "Yes. No. Maybe" == tokenizer.decode(token_ids)


@runners
@groupings
async def test_bug_11_stop_string_over_several_tokens_is_found_and_never_leaks(
    run: Runner, grouped: Grouping
) -> None:
    tokenizer, token_ids = with_pieces("uv w", "x", " y", "z!")
    answer = await run(tokenizer, Script(grouped(token_ids)), new_submit(stop=["wx yz"]))
    assert answer.text == "uv "
    assert not any("w" in delta for delta in answer.deltas)
    assert answer.finish == common_pb2.Finish(reason=STOP, stop_string="wx yz")
    assert answer.token_ids == token_ids and len(token_ids) == 4


async def test_bug_11_the_engine_is_told_to_abort_at_once() -> None:
    tokenizer, token_ids = with_pieces("uv w", "x", " y", "z!")
    engine = ScriptedEngine(Script(one_by_one(token_ids), ending=None))
    async with detok_line(token_bytes(tokenizer), engine) as line:
        answer = await line.generate(new_submit(stop=["wx yz"], request_id="r"))
        await until(lambda: bool(engine.aborted))
    assert (answer.text, answer.token_ids) == ("uv ", token_ids)
    assert [submit.request_id for submit in engine.aborted] == ["r"]
    assert not engine.live


@pytest.mark.parametrize(
    ("stop", "max_tokens", "reason"),
    [("blue\n##", 1000, STOP), ("blue\n##", 3, LENGTH), ("een b1", 1000, STOP)],
)
@runners
@groupings
async def test_bug_12_text_that_looked_like_a_stop_string_is_flushed(
    run: Runner, grouped: Grouping, stop: str, max_tokens: int, reason: int
) -> None:
    tokenizer, token_ids = with_pieces("red", " green", " blue")
    if max_tokens > 3:
        token_ids.append(IM_END)
    submit = new_submit(stop=[stop], max_tokens=max_tokens, eos=[IM_END])
    answer = await run(tokenizer, Script(grouped(token_ids), ending=None), submit)
    assert answer.text == "red green blue"
    # Answer.finish is that of the last output, so no text came after it.
    assert answer.finish == common_pb2.Finish(reason=reason)
    assert answer.token_ids == token_ids


@pytest.mark.parametrize("steps", [[1, 3, 1, 2], [1] * 7, [7]])
@runners
async def test_bug_21_every_token_is_counted_once_whatever_the_steps(
    run: Runner, steps: list[int]
) -> None:
    tokenizer = byte_level()
    # "ab" + half of "ñ", the other half, a control token that shows no text, "c", EOS.
    token_ids = [*tokenizer.encode("abñ").ids, 256, *tokenizer.encode("c").ids, IM_END]
    assert len(token_ids) == sum(steps) == 7
    ends = [sum(steps[: index + 1]) for index in range(len(steps))]
    script = Script([token_ids[end - size : end] for end, size in zip(ends, steps, strict=True)])
    answer = await run(tokenizer, script, new_submit(eos=[IM_END]))
    assert (answer.text, answer.token_ids) == ("abñc", token_ids)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@runners
async def test_bug_22_an_engine_error_is_passed_on_as_the_one_finish(
    run: Runner, num_tokens: int
) -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("abcdef").ids
    error = InternalError("The model broke.", code="nan_logits")
    script = Script(one_by_one(token_ids), error_after=num_tokens, error=error)
    answer = await run(tokenizer, script, new_submit())
    assert answer.text == "abcdef"[:num_tokens]
    assert answer.token_ids == token_ids[:num_tokens]
    assert answer.finish.reason == common_pb2.FINISH_REASON_ERROR
    assert answer.finish.error == common_pb2.Error(
        kind=common_pb2.ERROR_KIND_INTERNAL, code="nan_logits", message="The model broke."
    )


async def test_bug_22_other_streams_go_on_beside_an_error() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("abcdef").ids

    def script(submit: object) -> Script:
        failing = len(engine.submitted) % 2 == 1
        return Script(one_by_one(token_ids), error_after=3 if failing else None)

    engine = ScriptedEngine(script)
    async with detok_line(token_bytes(tokenizer), engine) as line:
        answers = await asyncio.gather(*(line.generate(new_submit()) for _ in range(20)))
        assert line.service.num_live == 0
    assert sorted(answer.text for answer in answers) == ["abc"] * 10 + ["abcdef"] * 10


async def test_bug_74_messages_over_four_mebibytes_pass_both_ways() -> None:
    tokenizer, (long_id,) = with_pieces("0123456789" * 10_000)
    engine = ScriptedEngine(Script([[long_id] * 50], num_cached_tokens=3))
    prompt = [64] * 4_500_000
    async with detok_line(token_bytes(tokenizer), engine) as line:
        submit = new_submit(prompt=prompt)
        assert submit.ByteSize() > 4 << 20
        answer = await line.generate(submit)
        assert len(answer.text) == 5_000_000
        assert len(engine.submitted[0].record.prompt_token_ids) == len(prompt)
        # The channel stays usable.
        assert len((await line.generate(new_submit())).text) == 5_000_000
