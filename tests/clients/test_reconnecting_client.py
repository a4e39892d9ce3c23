"""The tests' own reconnecting client: complete, in order, nothing twice, whatever breaks."""

import asyncio

import pytest

from tests.fakes.breaking_server import BreakingServer
from tests.fakes.reconnecting_client import DONE, Event, ReconnectingClient, Refused

WORDS = [f"w{number} " for number in range(20)]
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}


async def test_every_event_comes_once_over_broken_connections() -> None:
    script = BreakingServer(WORDS, breaks=[0, 3, 1, 16, 1, 0], refusals=2)
    async with script.serving() as server:
        client = ReconnectingClient([server.url, server.url])
        answer = await client.stream(BODY, "key-1")
    assert answer.is_complete
    assert [event.data for event in answer.events][-1] == DONE
    contents = [body["choices"][0]["delta"]["content"] for body in answer.bodies if body["choices"]]
    assert contents == WORDS
    assert [event.id for event in answer.events if event.data != DONE][:-1] == [
        str(number) for number in range(1, 21)
    ]
    assert len([body for body in answer.bodies if body["usage"]]) == 1
    assert not answer.duplicates
    assert answer.repeated and all(event.id == "20" for event in answer.repeated)
    assert answer.num_connections == 2 + len(script.requests)
    assert {headers["idempotency-key"] for headers in script.requests} == {"key-1"}
    assert [headers.get("last-event-id") for headers in script.requests] == [
        None,
        None,
        "3",
        "4",
        "20",
        "20",
        "20",
    ]


async def test_a_silent_gateway_is_left_for_the_next() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(silence, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent, BreakingServer(WORDS).serving() as server:
        answer = await ReconnectingClient([url, server.url], silence_seconds=0.1).stream(BODY, "k")
    assert answer.is_complete and answer.num_connections == 2


async def test_what_covers_tokens_that_were_there_is_a_duplicate() -> None:
    class Forgetful(BreakingServer):
        def _stream(self, writer: asyncio.StreamWriter, headers: dict[str, str]) -> None:
            super()._stream(writer, {})

    async with Forgetful(WORDS, breaks=[5]).serving() as server:
        answer = await ReconnectingClient([server.url]).stream(BODY, "k")
    assert [event.id for event in answer.duplicates] == ["1", "2", "3", "4"]
    assert len(answer.repeated) == 1


async def test_nobody_there_is_said_at_the_deadline() -> None:
    async with BreakingServer(WORDS).serving() as server:
        url = server.url
    with pytest.raises(Refused, match="deadline"):
        await ReconnectingClient([url], deadline_seconds=0.2).stream(BODY, "k")


def test_ids_count_the_tokens_of_each_choice() -> None:
    assert Event("3.10.0", "").covered == (3, 10, 0)
    assert Event("", "").covered == ()
