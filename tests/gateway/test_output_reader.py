"""However outputs are grouped, and wherever a client goes on, it gets exactly what it lacks."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answer_form import AnswerForm
from gateway.chat_form import ChatForm
from gateway.chat_reducer import TextReading
from gateway.completions import CompletionForm
from gateway.event_ids import id_line, parse_event_id
from gateway.followed_log import FollowedLog
from gateway.lanes import LineModel
from gateway.openai_schema import ChatCompletionRequest, CompletionRequest
from gateway.output_cut import cut
from gateway.output_log import OutputLog
from gateway.output_reader import OutputReader
from gateway.run_batches import RunHead
from gateway.tool_call_format import HERMES
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.stream_adapter import detok_adapter
from tests.fakes.calls import new_call
from tests.fakes.scripted_detok import output

MODEL = LineModel("m", "f" * 64, (1,), 100, 258)
SCRAPS = ["<think>", "a", "</think>", " b", "<tool_call>", '{"name":"g","arguments":{', "}}"]
SCRAPS += ["</tool_call>", "", "é🦜", "\n"]
READING = TextReading(has_reasoning=True, call_format=HERMES, tool_names=frozenset({"g"}))


def logprobs(text: str) -> detok_pb2.TokenLogprobs:
    token = detok_pb2.TokenLogprob(text=text, text_bytes=text.encode(), logprob=-0.5)
    return detok_pb2.TokenLogprobs(token=token)


@st.composite
def choices(draw: st.DrawFn) -> list[detok_pb2.Output]:
    """The outputs of one choice, a token each; the end may come without one."""
    has_logprobs = draw(st.booleans())
    texts = draw(st.lists(st.sampled_from(SCRAPS), min_size=1, max_size=10))
    outputs = [output(text, logprobs=[logprobs(text)] if has_logprobs else []) for text in texts]
    if draw(st.booleans()):
        first = output("", 0)
        first.prompt_logprobs.extend(logprobs(byte) for byte in "hi")
        outputs.insert(0, first)
    if draw(st.booleans()):
        outputs.append(output("!", 0, finish=common_pb2.FINISH_REASON_STOP))
    else:
        outputs[-1].finish.reason = common_pb2.FINISH_REASON_LENGTH
    return outputs


def grouped(outputs: Sequence[detok_pb2.Output], data: st.DataObject) -> list[detok_pb2.Output]:
    """The same, merged at random places; never an end without a token, which shows as such."""
    merged: list[detok_pb2.Output] = []
    for one in outputs:
        copy = detok_pb2.Output()
        copy.CopyFrom(one)
        if merged and (one.token_ids or not one.HasField("finish")) and data.draw(st.booleans()):
            detok_adapter().merge(merged[-1], copy)
        else:
            merged.append(copy)
    return merged


def new_form(kind: str) -> AnswerForm[Any]:
    if kind == "completion":
        body = CompletionRequest(model="m", prompt=["hi", "hi"], logprobs=1, echo=True)
        return CompletionForm(new_call(), MODEL, body, ["hi", "hi"])
    chat = ChatCompletionRequest(model="m", messages=b"[]", logprobs=True)  # type: ignore[arg-type]
    return ChatForm(new_call(), MODEL, chat, READING if kind == "tools" else TextReading())


def filled(groups: Sequence[Sequence[detok_pb2.Output]], data: st.DataObject) -> OutputLog:
    log = OutputLog(len(groups))
    log.begin(RunHead(num_prompt_tokens=2))
    queues = [(index, list(group)) for index, group in enumerate(groups)]
    while queues:
        index, queue = data.draw(st.sampled_from(queues))
        log.append(index, queue.pop(0))
        if data.draw(st.booleans()):
            log.batches(0)
        queues = [entry for entry in queues if entry[1]]
    log.end()
    return log


async def read(log: OutputLog, kind: str, had: Sequence[int] = ()) -> list[tuple[str, Any]]:
    """The events that follow `had`, each with its id."""
    form = new_form(kind)
    form.begin(in_reasoning=False)
    reader = OutputReader(
        log, had, lambda one: form.output_events(one.sequence_id, one, reader.usage)
    )
    events = []
    while not reader.is_at_end:
        for one in await reader.next_outputs(1.0):
            reader.advance(one)
            event = form.output_events(one.sequence_id, one, reader.usage)
            assert event.count(b"data: ") <= 1, "one output makes one event, or none"
            if event:
                body = json.loads(event.removeprefix(b"data: "))
                events.append((reader.id_line().decode().strip().removeprefix("id: "), body))
    return events


def joined(events: Sequence[tuple[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client makes of the events, per choice; lists and texts added up."""
    found: dict[int, dict[str, Any]] = {}
    for _, event in events:
        for choice in event["choices"]:
            made = found.setdefault(choice["index"], {"roles": 0, "reasons": [], "calls": {}})
            delta = choice.get("delta", choice)
            made["roles"] += "role" in delta
            for name in ("content", "reasoning_content", "text"):
                made[name] = made.get(name, "") + (delta.get(name) or "")
            for call in delta.get("tool_calls", ()):
                kept = made["calls"].setdefault(call["index"], {"ids": [], "arguments": ""})
                kept["ids"] += [call["id"]] if "id" in call else []
                kept["arguments"] += call["function"]["arguments"]
            listed = choice["logprobs"] or {}
            for name in ("content", "tokens", "token_logprobs", "text_offset"):
                made["l" + name] = made.get("l" + name, []) + (listed.get(name) or [])
            made["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


@settings(deadline=None)
@given(
    st.lists(choices(), min_size=1, max_size=2),
    st.sampled_from(["chat", "tools", "completion"]),
    st.data(),
)
def test_a_client_gets_exactly_what_it_lacks(
    outputs: list[list[detok_pb2.Output]], kind: str, data: st.DataObject
) -> None:
    async def check() -> None:
        first = await read(filled([grouped(one, data) for one in outputs], data), kind)
        ids = [parse_event_id(event_id, len(outputs), 100) for event_id, _ in first]
        sums = list(map(sum, ids))
        assert sums == sorted(set(sums)), "ids increase strictly"
        number = data.draw(st.integers(0, len(first)))
        had = ids[number - 1] if number else []
        other = filled([grouped(one, data) for one in outputs], data)
        rest = await read(other, kind, had)
        unbroken = await read(other, kind)
        assert joined(first[:number] + rest) == joined(first) == joined(unbroken)

    asyncio.run(check())


@settings(deadline=None)
@given(choices(), st.data())
def test_the_parts_of_an_output_are_the_whole(
    outputs: list[detok_pb2.Output], data: st.DataObject
) -> None:
    whole = outputs[0]
    for one in outputs[1:]:
        detok_adapter().merge(whole, one)
    number = data.draw(st.integers(0, len(whole.token_ids) - 1))
    head, rest = cut(whole, number)
    assert len(head.token_ids) == number
    assert not head.HasField("finish")
    detok_adapter().merge(head, rest)
    assert head == whole


@settings(deadline=None)
@given(st.lists(choices(), min_size=1, max_size=2), st.data())
def test_a_log_that_is_followed_becomes_the_same(
    outputs: list[list[detok_pb2.Output]], data: st.DataObject
) -> None:
    """Also where the follower had a part of it before, in other groups."""
    kept = filled([grouped(one, data) for one in outputs], data)
    own = OutputLog(len(outputs))
    own.begin(RunHead(num_prompt_tokens=2))
    for index, one in enumerate(outputs):
        for output_ in one[: data.draw(st.integers(0, len(one)))]:
            copy = detok_pb2.Output()
            copy.CopyFrom(output_)
            own.append(index, copy)
    followed = FollowedLog(own)
    batches = kept.batches(0)
    place = data.draw(st.integers(0, len(batches)))
    followed.take(batches[:place])
    followed.take(batches[place:])
    assert own.ended
    assert own.num_events == kept.num_events
    assert joined(asyncio.run(read(own, "chat"))) == joined(asyncio.run(read(kept, "chat")))


def test_event_ids_tell_how_far_each_choice_has_come() -> None:
    assert id_line([5]) == b"id: 5\n"
    assert id_line([5, 0, 7]) == b"id: 5.0.7\n"
    assert parse_event_id("5.0.7", 3, 7) == [5, 0, 7]
