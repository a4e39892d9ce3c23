"""How streams end and what usage they report: KNOWN_FAULTS 20 and 21."""

import pytest

from protos.common.v1 import common_pb2
from tests.fakes.gateway_line import GatewayLine, chunks_of, events_of
from tests.fakes.scripted_detok import DetokScript, output

pytestmark = pytest.mark.asyncio(loop_scope="module")


STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH

# Named for how the model's turn ends; an engine and detokenizer end it, a gateway reports it.
ENDINGS = {
    "by EOS": (DetokScript([output("a"), output("b"), output(finish=STOP)]), "stop"),
    "by max_tokens": (DetokScript([output("a"), output("b", finish=LENGTH)]), "length"),
    "by stop string": (DetokScript([output("a"), output("", finish=STOP)]), "stop"),
    "by EOS as the last of max_tokens": (
        DetokScript([output("a"), output("", finish=STOP)]),
        "stop",
    ),
}


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_bug_20_one_finish_reason_per_choice_on_its_last_chunk(
    line: GatewayLine, ending: str, n: int, endpoint: str
) -> None:
    line.detok.script, reason = ENDINGS[ending]
    response = await line.send(endpoint, n=n, stream=True)
    for index in range(n):
        chunks = chunks_of(response, index)
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
        if endpoint == "chat":
            roles = ["role" in chunk["delta"] for chunk in chunks]
            assert roles == [True] + [False] * (len(chunks) - 1)
    whole = (await line.send(endpoint, n=n)).json()
    assert [choice["finish_reason"] for choice in whole["choices"]] == [reason] * n


# Seven tokens: steps of 1, 3, 1 (no text), 1 and EOS.
SEVEN = DetokScript(
    [
        output("a", started=True),
        output("bcd", num_tokens=3),
        output(""),
        output("é"),
        output(finish=STOP),
    ]
)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_bug_21_usage_comes_last_and_counts_tokens_not_chunks(
    line: GatewayLine, n: int, endpoint: str
) -> None:
    line.detok.script = SEVEN
    whole = (await line.send(endpoint, n=n)).json()["usage"]
    assert whole["completion_tokens"] == 7 * n
    assert whole["total_tokens"] == 2 + 7 * n
    response = await line.send(endpoint, n=n, stream=True, stream_options={"include_usage": True})
    *chunks, last = events_of(response)
    assert last["choices"] == []
    assert last["usage"] == whole
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": False}}])
async def test_bug_21_no_usage_when_not_asked_for(
    line: GatewayLine, endpoint: str, fields: dict[str, object]
) -> None:
    line.detok.script = SEVEN
    events = events_of(await line.send(endpoint, stream=True, **fields))
    assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_bug_21_stream_options_without_stream_are_refused(
    line: GatewayLine, endpoint: str
) -> None:
    response = await line.send(endpoint, stream_options={"include_usage": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"
