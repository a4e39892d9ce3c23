"""Log-probabilities of the prompt: every token with its texts, once, before the first new one."""

import pytest

from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2
from tests.fakes.detok_line import Answer, detok_line, new_submit, run_in_process, token_bytes
from tests.fakes.engine_script import Script, one_per_step
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
BL = token_bytes(TOKENIZER)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def check(answer: Answer, prompt: str, num_top: int) -> None:
    entries = answer.prompt_logprobs
    assert [entry.token.token_id for entry in entries] == ids(prompt)
    assert b"".join(entry.token.text_bytes for entry in entries) == prompt.encode()
    assert entries[0] == detok_pb2.TokenLogprobs(
        token=detok_pb2.TokenLogprob(
            token_id=ids(prompt)[0], text=prompt[0], text_bytes=prompt[0].encode()
        )
    )
    for entry in entries[1:]:
        assert entry.token.logprob == -0.25
        assert len(entry.top) == num_top
    with_some = [bool(output.prompt_logprobs) for output in answer.outputs]
    with_tokens = [bool(output.token_ids) for output in answer.outputs]
    assert with_some.count(True) == 1
    assert with_some.index(True) <= with_tokens.index(True)


@pytest.mark.parametrize("prompt", ["a", "ab", "ab\N{PARROT}c"])
@pytest.mark.parametrize("num_top", [0, 2])
def test_every_token_of_the_prompt_is_listed_once(prompt: str, num_top: int) -> None:
    submit = new_submit(prompt=ids(prompt), top_prompt_logprobs=num_top)
    check(run_in_process(submit, one_per_step(ids("xyz")), BL), prompt, num_top)


async def test_they_reach_the_gateway() -> None:
    engine = ScriptedEngine(Script([[], *([i] for i in ids("xyz"))]))
    async with detok_line(BL, engine) as line:
        check(await line.generate(new_submit(prompt=ids("abc"), top_prompt_logprobs=1)), "abc", 1)


def test_they_come_without_the_log_probabilities_of_the_answer() -> None:
    submit = new_submit(prompt=ids("ab"), top_prompt_logprobs=0)
    assert run_in_process(submit, one_per_step(ids("x")), BL).logprobs == []
    submit = new_submit(prompt=ids("ab"), top_logprobs=0)
    assert run_in_process(submit, one_per_step(ids("x")), BL).prompt_logprobs == []


async def test_a_continued_sequence_does_not_ask_for_them_again() -> None:
    engine = ScriptedEngine(one_per_step(ids("xyz")))
    async with detok_line(BL, engine) as line:
        submit = new_submit(prompt=ids("ab"), output=ids("x"), top_prompt_logprobs=1)
        answer = await line.generate(submit)
    assert answer.prompt_logprobs == []
    (received,) = engine.submitted
    assert isinstance(received, engine_pb2.Submit)
    assert not received.record.sampling.prompt_logprobs
