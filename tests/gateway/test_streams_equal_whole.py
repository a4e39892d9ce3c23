"""Joined deltas are the whole answer, however outputs were grouped."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.chat_form import ChatForm
from gateway.completions import CompletionForm
from gateway.generation import Usage
from gateway.lanes import LineModel
from gateway.openai_schema import ChatCompletionRequest, CompletionRequest
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.stream_adapter import detok_adapter
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
    (made,) = json.loads(form.body([choice], USAGE))["choices"]
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
    form = ChatForm("id", MODEL, body)
    chunks = [
        event["choices"][0] for one in merged for event in events(form.output_events(0, one, USAGE))
    ]
    whole = whole_choice(form, outputs)
    assert "".join(joined(chunks, "delta", "content")) == whole["message"]["content"]
    assert joined(chunks, "logprobs", "content") == whole["logprobs"]["content"]
    reasons = [chunk["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
    assert ["role" in chunk["delta"] for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


@given(generations())
def test_completions(generation: tuple[list[detok_pb2.Output], list[detok_pb2.Output]]) -> None:
    outputs, merged = generation
    form = CompletionForm("id", MODEL, CompletionRequest(model="m", prompt="p", logprobs=1))
    chunks = [
        event["choices"][0] for one in merged for event in events(form.output_events(0, one, USAGE))
    ]
    whole = whole_choice(form, outputs)
    assert "".join(joined(chunks, "text")) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert joined(chunks, "logprobs", name) == values
    reasons = [chunk["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
