"""`tokenline ps` shows processes and live requests."""

import io
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from compose.process_table import format_duration, show_lines
from compose.state_file import LineState, ServiceState
from tests.fakes.http_app import serve_app
from tests.fakes.stand_in_gateway import StandInGateway


def live_request() -> dict[str, Any]:
    """A request of two hours and a little more than five minutes."""
    return {
        "id": "chatcmpl-1",
        "state": "decoding",
        "created": time.time() - 7510,
        "num_prompt_tokens": 12,
        "num_cached_tokens": 8,
        "num_output_tokens": 3,
        "engine": "127.0.0.1:20001",
    }


@pytest.fixture
def gateway() -> StandInGateway:
    return StandInGateway()


@pytest.fixture
def url(gateway: StandInGateway) -> Iterator[str]:
    with serve_app(gateway.app) as url:
        yield url


def show(*urls: str, api_key: str = "") -> list[list[str]]:
    services = (
        ServiceState("engine_svc", os.getpid(), "127.0.0.1:20001", 2),
        ServiceState("gateway", 2**22 + 1, "127.0.0.1:8000", 0),
    )
    console = Console(file=io.StringIO(), width=40)
    show_lines([LineState(1, 0.0, "m.gguf", urls, services)], console, api_key)
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_processes_are_shown_with_what_they_use(url: str) -> None:
    rows = {row[0]: row for row in show(url) if row}
    engine = rows["engine_svc"]
    assert engine[1:3] == [str(os.getpid()), "20001"]
    assert float(engine[4]) > 10
    assert engine[-1] == "2"
    # A process that has ended since is still listed.
    assert "ended" in rows["gateway"]


def test_each_line_is_headed_by_the_name_that_it_serves(url: str) -> None:
    assert show(url)[0][:3] == ["stand-in", "at", url]
    # Until there is one, the file's name.
    assert show("http://127.0.0.1:9")[0][0] == "m.gguf"


def test_live_requests_of_all_gateways_are_shown_once(gateway: StandInGateway, url: str) -> None:
    gateway.requests = [live_request()]
    rows = [row for row in show(url, url) if row and row[0] == "chatcmpl-1"]
    assert rows == [["chatcmpl-1", "decoding", "12", "8", "3", "2h05m", "127.0.0.1:20001"]]


def test_records_of_another_make_are_said(gateway: StandInGateway, url: str) -> None:
    gateway.requests = [{"id": "chatcmpl-1"}]
    assert any("does not answer as a gateway" in " ".join(row) for row in show(url))


def test_no_request_and_no_gateway_are_said(url: str) -> None:
    assert ["no", "live", "request"] in show(url)
    assert any("nothing answers" in " ".join(row) for row in show("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (7.9, "7s"), (192, "3m12s"), (7500, "2h05m"), (4 * 86400 + 7 * 3600, "4d07h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_gateway_that_asks_for_a_key_is_asked_with_it(gateway: StandInGateway, url: str) -> None:
    gateway.api_key = "tl-secret"
    gateway.requests = [live_request()]
    with_key = [" ".join(row) for row in show(url, api_key="tl-secret")]
    assert any(row.startswith("chatcmpl-1 ") for row in with_key)
    assert with_key[0].startswith("stand-in at ")
    without = " ".join(" ".join(row) for row in show(url))
    assert "--api-key or TOKENLINE_API_KEY" in without
