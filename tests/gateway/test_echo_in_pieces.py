"""With echo, too, joined deltas are the whole answer, however outputs were grouped."""

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.answer_form import Choice
from gateway.completions import CompletionForm
from gateway.lanes import LineModel
from gateway.openai_schema import CompletionRequest
from gateway.usage import Usage
from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.stream_adapter import detok_adapter
from tests.fakes.calls import new_call
from tests.fakes.scripted_detok import output

MODEL = LineModel("m", "f" * 64, (1,), 100, 258)
USAGE = Usage(1, 0, 1)
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=4)


def logprobs(raw: bytes) -> detok_pb2.TokenLogprobs:
    token = detok_pb2.TokenLogprob(text=repr(raw), text_bytes=raw, logprob=-0.5)
    return detok_pb2.TokenLogprobs(token=token, top=[token])


def outputs_of(prompt: str, tokens: list[str]) -> list[detok_pb2.Output]:
    """A prompt whose every byte is a token, and an answer of `tokens`."""
    first = output("", 0)
    first.prompt_logprobs.extend(logprobs(bytes([byte])) for byte in prompt.encode())
    answer = [output(text, logprobs=[logprobs(text.encode())]) for text in tokens]
    return [first, *answer, output(finish=common_pb2.FINISH_REASON_STOP)]


@given(texts.filter(bool), st.lists(texts, max_size=6), st.data())
def test_joined_deltas_are_the_whole_answer(
    prompt: str, tokens: list[str], data: st.DataObject
) -> None:
    body = CompletionRequest(model="m", prompt=prompt, logprobs=1, echo=True)
    form = CompletionForm(new_call(), MODEL, body, [prompt])
    merged: list[detok_pb2.Output] = []
    choice = Choice()
    for one in outputs_of(prompt, tokens):
        choice.add(one)
        if merged and data.draw(st.booleans()):
            detok_adapter().merge(merged[-1], one)
        else:
            merged.append(one)
    sent = b"".join(form.output_events(0, one, USAGE) for one in merged).decode()
    chunks: list[Any] = [
        json.loads(event.removeprefix("data: "))["choices"][0]
        for event in sent.split("\n\n")
        if event
    ]
    (whole,) = json.loads(asyncio.run(form.whole([choice], USAGE)))["choices"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] == prompt + "".join(tokens)
    for name, values in whole["logprobs"].items():
        streamed = [chunk["logprobs"][name] for chunk in chunks if chunk["logprobs"]]
        assert [value for found in streamed for value in found] == values
        assert len(values) == len(prompt.encode()) + len(tokens)
    offsets = whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert [chunk["finish_reason"] for chunk in chunks][-1] == "stop"
