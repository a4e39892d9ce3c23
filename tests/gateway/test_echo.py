"""echo: the prompt before the answer, with its log-probabilities, streamed or whole."""

from collections.abc import Sequence
from typing import Any

import pytest

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import InternalError
from tests.fakes.gateway_line import GatewayLine, chunks_of, events_of, streamed_text, whole_text
from tests.fakes.scripted_detok import DetokScript, output

pytestmark = pytest.mark.asyncio(loop_scope="module")

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


def token(raw: bytes, logprob: float) -> detok_pb2.TokenLogprob:
    return detok_pb2.TokenLogprob(
        token_id=raw[0], text=raw.decode(errors="backslashreplace"), text_bytes=raw, logprob=logprob
    )


def entry(raw: bytes, logprob: float, top: Sequence[bytes] = ()) -> detok_pb2.TokenLogprobs:
    return detok_pb2.TokenLogprobs(
        token=token(raw, logprob),
        top=[token(other, -0.25 * rank) for rank, other in enumerate(top, start=1)],
    )


def answering(submit: detok_pb2.Submit) -> DetokScript:
    """Says `!?`, after the log-probabilities of the prompt where they are asked for."""
    sampling = submit.record.sampling
    prompt = [bytes([token_id]) for token_id in submit.record.prompt_token_ids]
    tops = [b"x", b"y", b"z"][: sampling.top_prompt_logprobs]
    started = output("", 0, started=True)
    if sampling.prompt_logprobs:
        started.prompt_logprobs.append(entry(prompt[0], 0.0))
        started.prompt_logprobs.extend(entry(raw, -2.0, tops) for raw in prompt[1:])
    answer = [entry(raw, -1.0, [b"x"][: sampling.top_logprobs]) for raw in (b"!", b"?")]
    if not sampling.logprobs:
        return DetokScript([started, output("!"), output("?"), output(finish=STOP)])
    return DetokScript(
        [
            started,
            output("!", logprobs=answer[:1]),
            output("?", logprobs=answer[1:]),
            output(finish=STOP),
        ]
    )


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("añ", ["añ"]),
        ([104, 105], ["hi"]),
        (["a", "bc"], ["a", "bc"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_comes_before_each_of_its_choices(
    line: GatewayLine, prompt: Any, texts: list[str], stream: bool
) -> None:
    line.detok.script = answering
    response = await line.complete(prompt=prompt, echo=True, n=2, stream=stream)
    for index in range(2 * len(texts)):
        text = streamed_text(response, index) if stream else whole_text(response, index)
        assert text == texts[index // 2] + "!?"
    assert not line.detok.submitted[0].record.sampling.prompt_logprobs


EXPECTED = {
    "tokens": ["h", "\\xc3", "\\xb1", "i", "!", "?"],
    "token_logprobs": [None, -2.0, -2.0, -2.0, -1.0, -1.0],
    "top_logprobs": [
        None,
        {"x": -0.25, "\\xc3": -2.0},
        {"x": -0.25, "\\xb1": -2.0},
        {"x": -0.25, "i": -2.0},
        {"x": -0.25, "!": -1.0},
        {"x": -0.25, "?": -1.0},
    ],
    "text_offset": [0, 1, 1, 2, 3, 4],
}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_log_probabilities_come_first(line: GatewayLine, stream: bool) -> None:
    line.detok.script = answering
    response = await line.complete(prompt="hñi", echo=True, logprobs=1, stream=stream)
    if stream:
        listed = [chunk["logprobs"] for chunk in chunks_of(response) if chunk["logprobs"]]
        found = {name: [item for lists in listed for item in lists[name]] for name in EXPECTED}
    else:
        found = response.json()["choices"][0]["logprobs"]
    assert found == EXPECTED
    sampling = line.detok.submitted[0].record.sampling
    assert sampling.prompt_logprobs and sampling.top_prompt_logprobs == 1


async def test_logprobs_zero_lists_no_likeliest(line: GatewayLine) -> None:
    line.detok.script = answering
    (choice,) = (await line.complete(prompt="hi", echo=True, logprobs=0)).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0, -1.0]
    assert choice["logprobs"]["top_logprobs"] == [None] * 4


async def test_tokens_that_the_tokenizer_added_take_no_room_in_the_text(line: GatewayLine) -> None:
    entries = [entry(b"<s>", 0.0), entry(b" hi", -1.0), entry(b" you", -1.0)]
    started = output("", 0, started=True)
    started.prompt_logprobs.extend(entries)
    answer = output("!", logprobs=[entry(b"!", -1.0)])
    line.detok.script = DetokScript([started, answer, output(finish=STOP)])
    (choice,) = (await line.complete(prompt="hi you", echo=True, logprobs=0)).json()["choices"]
    assert choice["text"] == "hi you!"
    assert choice["logprobs"]["text_offset"] == [0, 0, 2, 6]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_echoes_and_samples_nothing(
    line: GatewayLine, logprobs: int | None, stream: bool
) -> None:
    line.detok.script = answering
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    response = await line.complete(
        prompt="hi", echo=True, max_tokens=0, logprobs=logprobs, stream=stream, **fields
    )
    if stream:
        choices = chunks_of(response)
        assert streamed_text(response) == "hi"
        assert [choice["finish_reason"] for choice in choices] == ["length"]
        usage = events_of(response)[-1]["usage"]
        listed = choices[0]["logprobs"]
    else:
        (choice,) = response.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
        usage, listed = response.json()["usage"], choice["logprobs"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 0)
    assert (listed and listed["token_logprobs"]) == ([None, -2.0] if logprobs else None)
    record = await line.record_when(response.headers["x-request-id"])
    assert (record["finish_reason"], record["num_output_tokens"]) == ("length", 0)


async def test_max_tokens_0_without_echo_is_refused(line: GatewayLine) -> None:
    response = await line.complete(max_tokens=0)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_echoes_nothing(
    line: GatewayLine, stream: bool
) -> None:
    line.detok.script = DetokScript([output("", 0, error=InternalError("The scripted fault."))])
    response = await line.complete(echo=True, stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "The scripted fault."


async def test_ids_outside_the_vocabulary_are_refused_before_they_are_decoded(
    line: GatewayLine,
) -> None:
    response = await line.complete(prompt=[258], echo=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
