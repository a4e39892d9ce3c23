"""Thoughts over HTTP: told from the answer where the model thinks aloud, and only there."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.gateway_line import GatewayLine, chunks_of, gateway_line
from tests.fakes.scripted_detok import pieces
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

THINKING = ["<thi", "nk>\nhm", ", so\n", "</think>", "\n\nYes."]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking_line(valkey: Valkey) -> AsyncIterator[GatewayLine]:
    async with gateway_line(valkey.url, redis_prefix="think:", reasoning="on") as running:
        yield running


@pytest.fixture
def line(thinking_line: GatewayLine) -> GatewayLine:
    thinking_line.reset()
    thinking_line.tokenizer.in_reasoning = False
    return thinking_line


async def answers(line: GatewayLine) -> tuple[str | None, str]:
    """Thoughts and answer, which a stream and a whole answer must share."""
    message = (await line.chat()).json()["choices"][0]["message"]
    deltas = [chunk["delta"] for chunk in chunks_of(await line.chat(stream=True))]
    thoughts = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert thoughts == message.get("reasoning_content", "")
    assert content == message["content"]
    return message.get("reasoning_content"), message["content"]


async def test_thoughts_are_told_from_the_answer(line: GatewayLine) -> None:
    line.detok.script = pieces(*THINKING)
    assert await answers(line) == ("hm, so", "Yes.")


async def test_thoughts_that_the_template_opens_are_told_too(line: GatewayLine) -> None:
    line.tokenizer.in_reasoning = True
    line.detok.script = pieces("hm", "</think>", "Yes.")
    assert await answers(line) == ("hm", "Yes.")


async def test_an_answer_without_thoughts_has_none(line: GatewayLine) -> None:
    assert await answers(line) == (None, "Hello there")


async def test_what_must_match_a_grammar_leaves_no_room_for_thoughts(line: GatewayLine) -> None:
    line.detok.script = pieces("{}")
    fields = {"response_format": {"type": "json_object"}}
    message = (await line.chat(**fields)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "{}", "refusal": None}
    kwargs = [json.loads(sent.chat.template_kwargs_json) for sent in line.tokenizer.encoded]
    assert kwargs == [{"enable_thinking": False}]


async def test_the_switch_for_thoughts_reaches_the_template(line: GatewayLine) -> None:
    await line.chat(chat_template_kwargs={"enable_thinking": True})
    (sent,) = line.tokenizer.encoded
    assert json.loads(sent.chat.template_kwargs_json) == {"enable_thinking": True}


async def test_control_tokens_of_thoughts_stay_in_the_text(line: GatewayLine) -> None:
    await line.chat()
    assert list(line.detok.submitted[0].shown_control_tokens) == ["<think>", "</think>"]


async def test_without_the_setting_text_is_untouched(valkey: Valkey) -> None:
    async with gateway_line(valkey.url, redis_prefix="plain:", reasoning="off") as line:
        line.detok.script = pieces(*THINKING)
        assert await answers(line) == (None, "".join(THINKING))
