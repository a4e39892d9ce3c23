"""The clients that the README shows get the whole answer, once, over broken connections."""

import pytest

from tests.clients.conftest import MAX_LINES, ReadmeClient, readme_block
from tests.fakes.breaking_server import BreakingServer

WORDS = [f"wörd{number} " for number in range(12)]
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("language", "name"), [("python", "reconnect.py"), ("js", "reconnect.mjs")]
)
def test_they_fit_on_a_page(language: str, name: str) -> None:
    assert len(readme_block(language, name).splitlines()) <= MAX_LINES


async def test_they_get_every_chunk_once(readme_client: ReadmeClient) -> None:
    script = BreakingServer(WORDS, breaks=[0, 3, 1, 8, 1, 0], refusals=2)
    gone = BreakingServer(WORDS)
    async with gone.serving():
        pass
    async with script.serving() as server:
        here = f"127.0.0.1:{server.port}"
        chunks = await readme_client(BODY, [here, f"127.0.0.1:{gone.port}", here])
    contents = [chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk["choices"]]
    assert contents == WORDS
    assert len([chunk for chunk in chunks if chunk["usage"]]) == 1
    assert chunks[-1]["usage"]["completion_tokens"] == len(WORDS)
    assert len({headers["idempotency-key"] for headers in script.requests}) == 1
    named = [headers.get("last-event-id") for headers in script.requests]
    assert named == [None, None, "3", "4", "12", "12", "12"]
    assert all(headers["content-type"] == "application/json" for headers in script.requests)
