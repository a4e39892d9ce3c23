"""Joined deltas are the whole answer, however outputs were grouped."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.chat_form import ChatForm
from gateway.chat_reducer import TextReading
from gateway.completions import CompletionForm
from gateway.lanes import LineModel
from gateway.openai_schema import ChatCompletionRequest, CompletionRequest
from gateway.tool_call_format import HERMES, LLAMA3_JSON, MISTRAL
from gateway.usage import Usage
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.stream_adapter import detok_adapter
from tests.fakes.calls import new_call
from tests.fakes.scripted_detok import output

MODEL = LineModel('m"%s', "f" * 64, (1,), 100, 258)
USAGE = Usage(1, 0, 1)
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=4)


def logprobs(text: str) -> detok_pb2.TokenLogprobs:
    token = detok_pb2.TokenLogprob(text=text, text_bytes=text.encode(), logprob=-0.5)
    return detok_pb2.TokenLogprobs(token=token, top=[token])


@st.composite
def generations(draw: st.DrawFn) -> tuple[list[detok_pb2.Output], list[detok_pb2.Output]]:
    """The outputs of one choice, and the same merged at random places."""
    tokens = draw(st.lists(texts, max_size=8))
    outputs = [output(text, logprobs=[logprobs(text)]) for text in tokens]
    outputs.append(output(draw(texts), finish=common_pb2.FINISH_REASON_LENGTH))
    merged: list[detok_pb2.Output] = []
    for one in outputs:
        copy = detok_pb2.Output()
        copy.CopyFrom(one)
        if merged and draw(st.booleans()):
            detok_adapter().merge(merged[-1], copy)
        else:
            merged.append(copy)
    return outputs, merged


def events(sent: bytes) -> list[dict[str, Any]]:
    return [
        json.loads(event.removeprefix("data: ")) for event in sent.decode().split("\n\n") if event
    ]


def whole_choice(form: ChatForm | CompletionForm, outputs: Sequence[detok_pb2.Output]) -> Any:
    choice = form.new_choice()
    for one in outputs:
        choice.add(one)
    (made,) = json.loads(asyncio.run(form.whole([choice], USAGE)))["choices"]
    return made


def joined(chunks: Sequence[Any], *path: str) -> list[Any]:
    """What all chunks have at `path`, one after the other."""
    found: list[Any] = []
    for chunk in chunks:
        for name in path:
            chunk = (chunk or {}).get(name)
        found += chunk or []
    return found


@given(generations())
def test_chat(generation: tuple[list[detok_pb2.Output], list[detok_pb2.Output]]) -> None:
    outputs, merged = generation
    body = ChatCompletionRequest(model="m", messages=b"[]", logprobs=True)  # type: ignore[arg-type]
    form = ChatForm(new_call(), MODEL, body)
    chunks = [
        event["choices"][0] for one in merged for event in events(form.output_events(0, one, USAGE))
    ]
    whole = whole_choice(form, outputs)
    assert "".join(joined(chunks, "delta", "content")) == whole["message"]["content"]
    assert joined(chunks, "logprobs", "content") == whole["logprobs"]["content"]
    reasons = [chunk["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
    assert ["role" in chunk["delta"] for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


SCRAPS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *("[", "]", ";", ",", "{", "}", '"name"', '"arguments"', ":", '"g"', " ", "\n", "text", "<to"),
    *('{"name":"g","arguments":{', '{"name": "g", "parameters": {"q": "x"}}', "}}", "é🦜"),
]
readings = st.builds(
    TextReading,
    has_reasoning=st.booleans(),
    call_format=st.sampled_from([None, HERMES, LLAMA3_JSON, MISTRAL]),
    tool_names=st.just(frozenset({"g"})),
    max_calls=st.sampled_from([None, 1]),
    begins_bare=st.booleans(),
)
reasons = st.sampled_from([common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH])


def joined_message(chunks: Sequence[Any]) -> dict[str, Any]:
    """What a client makes of the deltas; calls without their ids."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    for delta in (chunk["delta"] for chunk in chunks):
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"type": call["type"], "function": call["function"]})
            else:
                function = calls[call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
    return {**message, "tool_calls": calls} if calls else message


@given(readings, st.booleans(), st.lists(st.sampled_from(SCRAPS), max_size=16), reasons, st.data())
def test_chats_with_tools_and_thoughts(
    reading: TextReading,
    in_reasoning: bool,
    scraps: list[str],
    reason: common_pb2.FinishReason.ValueType,
    data: st.DataObject,
) -> None:
    body = ChatCompletionRequest(model="m", messages=b"[]")  # type: ignore[arg-type]
    form = ChatForm(new_call(), MODEL, body, reading)
    form.begin(in_reasoning=in_reasoning)
    text = "".join(scraps)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    outputs = [output(piece) for piece in pieces] + [output(finish=reason)]
    chunks = [
        event["choices"][0]
        for one in outputs
        for event in events(form.output_events(0, one, USAGE))
    ]
    whole = whole_choice(form, [output(text), output(finish=reason)])
    for call in whole["message"].get("tool_calls", ()):
        del call["id"]
    assert joined_message(chunks) == whole["message"]
    found = [chunk["finish_reason"] for chunk in chunks]
    assert found == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
    assert ["role" in chunk["delta"] for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


@given(generations())
def test_completions(generation: tuple[list[detok_pb2.Output], list[detok_pb2.Output]]) -> None:
    outputs, merged = generation
    form = CompletionForm(new_call(), MODEL, CompletionRequest(model="m", prompt="p", logprobs=1))
    chunks = [
        event["choices"][0] for one in merged for event in events(form.output_events(0, one, USAGE))
    ]
    whole = whole_choice(form, outputs)
    assert "".join(joined(chunks, "text")) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert joined(chunks, "logprobs", name) == values
    reasons = [chunk["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
