"""Template workers: limits of time, memory and files hold, and a dead worker is replaced."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.wire.errors import InvalidRequest, StartupError
from tests.tokenizer_svc.conftest import Family
from tokenizer_svc.rendered_prompt import RenderedPrompt
from tokenizer_svc.template_messages import Render, Setup
from tokenizer_svc.template_workers import TemplateWorkers

# What templates read of a message.
NAMES = ("role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "user")
# Does what the first message says, but not when it is tried out at the start.
OBEDIENT = """
{%- set word = messages[0].content -%}
{%- if word == 'spin' -%}
  {%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor -%}
{%- elif word == 'hog' -%}
  {%- set ns = namespace(x='x' * 1000) -%}
  {%- for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor -%}
{%- elif word == 'power' -%}
  {%- set n = 2 * word | length -%}{{ n ** (n ** n) }}
{%- elif word == 'pad' -%}{{ 'x'.ljust(10 ** 11) }}
{%- else -%}
  {%- for m in messages %}{{ m.content }}<|end|>{% endfor -%}
{%- endif -%}
"""


def setup_of(template: str = OBEDIENT, seconds: float = 0.5) -> Setup:
    return Setup(
        templates={"default": template},
        special_tokens={},
        control_texts=["<|end|>"],
        max_output_characters=1_000_000,
        max_memory_bytes=128 << 20,
        max_seconds=seconds,
    )


def chat(content: str) -> Render:
    messages = json.dumps([{"role": "user", "content": content}]).encode()
    return Render(messages, b"", b"", True)


async def test_a_chat_is_rendered_with_its_stand_ins() -> None:
    async with TemplateWorkers(setup_of()) as workers:
        prompt = await workers.render(chat("a<|end|>"))
        assert prompt == RenderedPrompt("a\ue000|end|><|end|>", {"\ue000": "<"})
        assert workers.turn_ends == {"<|end|>"}


@pytest.mark.parametrize("word", ["spin", "power"])
async def test_a_rendering_over_its_time_is_ended_and_the_next_one_works(word: str) -> None:
    async with TemplateWorkers(setup_of()) as workers:
        with pytest.raises(InvalidRequest, match=r"longer than the 0.5 s") as caught:
            await workers.render(chat(word))
        assert caught.value.param == "messages"
        assert (await workers.render(chat("ok"))).text == "ok<|end|>"


@pytest.mark.parametrize("word", ["hog", "pad"])
async def test_a_rendering_over_its_memory_is_refused(word: str) -> None:
    async with TemplateWorkers(setup_of(seconds=5)) as workers:
        with pytest.raises(InvalidRequest, match="memory"):
            await workers.render(chat(word))
        assert (await workers.render(chat("ok"))).text == "ok<|end|>"


async def test_many_chats_share_the_workers() -> None:
    async with TemplateWorkers(setup_of(seconds=5), num_workers=2) as workers:
        words = [f"word {index}" for index in range(200)]
        prompts = await asyncio.gather(*(workers.render(chat(word)) for word in words))
        assert [prompt.text for prompt in prompts] == [f"{word}<|end|>" for word in words]


async def test_a_caller_that_gives_up_does_not_mix_up_the_answers() -> None:
    async with TemplateWorkers(setup_of(seconds=5)) as workers:
        for index in range(30):
            given_up = asyncio.create_task(workers.render(chat("given up" * 1000)))
            for _ in range(index % 5):
                await asyncio.sleep(0)
            given_up.cancel()
            assert (await workers.render(chat(f"kept {index}"))).text == f"kept {index}<|end|>"


async def test_a_caller_that_gives_up_while_it_waits_is_not_rendered_for() -> None:
    async with TemplateWorkers(setup_of()) as workers:
        running = asyncio.create_task(workers.render(chat("spin")))
        # Each of these would take the worker for half a second, and end it.
        given_up = [asyncio.create_task(workers.render(chat("spin"))) for _ in range(200)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        results = await asyncio.gather(*given_up, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        with pytest.raises(InvalidRequest, match="longer than"):
            await running
        assert (await workers.render(chat("ok"))).text == "ok<|end|>"


async def test_a_chat_that_is_refused_names_its_field() -> None:
    async with TemplateWorkers(setup_of()) as workers:
        with pytest.raises(InvalidRequest) as caught:
            await workers.render(Render(b"[]", b"", b"", True))
        assert caught.value.param == "messages"
        with pytest.raises(InvalidRequest) as caught:
            await workers.render(Render(b'[{"role":"user"}]', b"{", b"", True))
        assert caught.value.param == "tools"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
CHATS = st.builds(
    lambda *parts: Render(*(json.dumps(part).encode() for part in parts), True),
    st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), max_size=3) | JSON,
    st.none() | JSON,
    st.just({}) | JSON,
)


async def test_no_chat_ends_a_worker(family: Family) -> None:
    setup = msgspec.structs.replace(
        setup_of(family.template, seconds=5), special_tokens=dict(family.special_tokens)
    )
    deep = b"[" * 900 + b"]" * 900
    arguments = json.dumps("[" * 5000 + "]" * 5000).encode()
    hostile = [
        Render(b'[{"role":{}}]', b"", b"", True),
        Render(b'[{"role":"user","content":"a"}]', b"", b'{"x":' + deep + b"}", True),
        Render(
            b'[{"role":"user"},{"role":"assistant","tool_calls":[{"function":{"name":"f",'
            b'"arguments":{"a":' + arguments + b"}}}]}]",
            b"",
            b"",
            True,
        ),
    ]

    before = set(psutil.Process().children())
    async with TemplateWorkers(setup) as workers:
        (process,) = set(psutil.Process().children()) - before

        async def no_death(render: Render) -> None:
            with contextlib.suppress(InvalidRequest):
                await workers.render(render)

        for render in hostile:
            await no_death(render)
        await asyncio.to_thread(_for_each_chat, no_death, asyncio.get_running_loop())
        assert process.is_running()
        assert set(psutil.Process().children()) - before == {process}


def _for_each_chat(
    check: Callable[[Render], Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop
) -> None:
    @settings(max_examples=40, deadline=None)
    @given(render=CHATS)
    def every(render: Render) -> None:
        asyncio.run_coroutine_threadsafe(check(render), loop).result(30)

    every()


async def test_a_template_that_does_not_parse_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="line 1"):
        async with TemplateWorkers(setup_of("{% for %}")):
            pass


async def test_a_template_that_hangs_at_the_start_is_a_startup_error() -> None:
    spinning = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(StartupError, match="longer than"):
        async with TemplateWorkers(setup_of(spinning)):
            pass


async def test_the_longest_chats_pass_through_the_pipe() -> None:
    setup = msgspec.structs.replace(
        setup_of(seconds=30), max_output_characters=10_000_000, max_memory_bytes=512 << 20
    )
    async with TemplateWorkers(setup) as workers:
        text = "long " * 840_000
        assert (await workers.render(chat(text))).text == text + "<|end|>"


async def test_no_worker_is_left_behind() -> None:
    before = psutil.Process().children()
    async with TemplateWorkers(setup_of(), num_workers=2):
        workers = [child for child in psutil.Process().children() if child not in before]
        assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
