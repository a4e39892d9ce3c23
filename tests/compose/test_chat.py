"""`tokenline chat` shows what arrives, remembers it, and says clearly what went wrong."""

import io
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from compose.answer_view import Answer, show_answer
from compose.chat import Conversation
from compose.errors import CommandError
from compose.gateway_client import AnswerPart, GatewayClient
from compose.state_file import LineState
from tests.fakes.http_app import serve_app
from tests.fakes.pseudo_terminal import in_terminal
from tests.fakes.running_line import TOKENLINE
from tests.fakes.stand_in_gateway import StandInGateway, chunk, usage

EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    chunk("It is "),
    chunk("Paris.\nReally"),
    chunk(None, "stop"),
    usage(7),
    "[DONE]",
]


@pytest.fixture
def gateway() -> StandInGateway:
    return StandInGateway(EVENTS)


@pytest.fixture
def url(gateway: StandInGateway) -> Iterator[str]:
    with serve_app(gateway.app) as url:
        yield url


def run_chat(
    url: str, *arguments: str, typed: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOKENLINE, "chat", "--url", url, *arguments],
        env={**os.environ, **environment},
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
    )


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_one_question_prints_the_answer_alone(gateway: StandInGateway, url: str) -> None:
    result = run_chat(
        url, "Where?", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "9"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "It is Paris.\nReally\n"
    assert "7 tokens" in result.stderr
    (body,) = gateway.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
    ]
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 9, True)


def test_a_conversation_sends_what_was_said_before(gateway: StandInGateway, url: str) -> None:
    result = run_chat(url, typed="first\n\nsecond\n")
    assert result.returncode == 0, result.stderr
    assert "stand-in" in result.stdout
    assert [message["content"] for message in gateway.bodies[1]["messages"]] == [
        "first",
        "It is Paris.\nReally",
        "second",
    ]


def test_answers_are_bounded_and_the_defaults_are_said(gateway: StandInGateway, url: str) -> None:
    result = run_chat(url, typed="first\n")
    assert f"stand-in at {url} (temperature 0.2, answers of at most 512 tokens" in unwrapped(
        result.stdout
    )
    gateway.max_model_len = 100
    run_chat(url, "Where?")
    assert [(body["temperature"], body["max_tokens"]) for body in gateway.bodies] == [
        (0.2, 512),
        (0.2, 50),
    ]


def test_after_an_error_the_conversation_goes_on(gateway: StandInGateway, url: str) -> None:
    gateway.refusal = (400, b'{"error": {"message": "too long"}}')
    result = run_chat(url, typed="first\nsecond\n")
    assert result.returncode == 0
    assert result.stdout.count("the gateway refused: too long") == 2
    assert [len(body["messages"]) for body in gateway.bodies] == [1, 1]


def test_nothing_there_says_how_to_start_it() -> None:
    result = run_chat("http://127.0.0.1:9", "hi")
    assert result.returncode == 1
    assert "tokenline up" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["http://", "ftp://host", "http://host:port", "a b", "host:0"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(CommandError, match="expected a URL such as"):
        GatewayClient(url)


def test_a_host_that_does_not_exist_is_one_line() -> None:
    result = run_chat("banana.invalid", "hi")
    assert result.returncode == 1
    assert result.stderr.startswith("tokenline: nothing answers at http://banana.invalid (")
    assert len(result.stderr.splitlines()) == 1


def ask(url: str) -> Answer:
    console = Console(file=io.StringIO())
    with GatewayClient(url) as client:
        return Conversation(client, console).ask("Where?")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([chunk("It"), {"error": {"message": "engine lost"}}, "[DONE]"], "engine lost"),
        ([chunk("It")], "closed the connection"),
        (["{not json"], "does not answer as a gateway"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(
    events: list[object], words: str, gateway: StandInGateway, url: str
) -> None:
    gateway.events = events  # type: ignore[assignment]
    with pytest.raises(CommandError, match=words):
        ask(url)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (429, b'{"error": {"message": "try later"}}', "try later"),
        (502, b"<html>", "status 502"),
    ],
)
def test_a_refusal_is_told(
    status: int, body: bytes, words: str, gateway: StandInGateway, url: str
) -> None:
    gateway.refusal = (status, body)
    with pytest.raises(CommandError, match=words):
        ask(url)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_be_that_of_the_api(suffix: str, url: str) -> None:
    assert ask(url + suffix).text == "It is Paris.\nReally"


def test_a_url_needs_no_scheme(url: str) -> None:
    assert ask(url.removeprefix("http://")).text == "It is Paris.\nReally"


def test_a_line_that_serves_no_model_yet_is_said(gateway: StandInGateway, url: str) -> None:
    gateway.missing = ["engine 127.0.0.1:1 loads its model"]
    with pytest.raises(CommandError, match="is not ready"):
        ask(url)


def test_of_several_lines_the_one_that_answers_is_said(url: str, tmp_path: Path) -> None:
    for name in ("line-1.json", "line-2.json"):
        launcher = psutil.Process()
        path = tmp_path / "tokenline" / name
        path.parent.mkdir(exist_ok=True)
        state = LineState(launcher.pid, launcher.create_time(), "m", (url,), ())
        path.write_text(json.dumps(asdict(state)))
    result = run_chat("", "Where?", XDG_RUNTIME_DIR=str(tmp_path))
    assert result.returncode == 0
    assert f"2 lines run here; this is the latest, at {url}: --url names another" in result.stderr


def test_ctrl_c_at_the_prompt_gives_up_the_line_only(url: str) -> None:
    command = [TOKENLINE, "chat", "--url", url]
    with in_terminal(command) as (process, terminal):
        terminal.expect("> ")
        terminal.type("half a ques")
        terminal.expect("half a ques")
        terminal.interrupt("Ctrl-D ends the conversation.")
        terminal.type("Where?\n")
        terminal.expect("7 tokens")
        terminal.expect("> ")
        terminal.type("\x04")
        assert process.wait(30) == 0


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_in_a_terminal_the_rate_is_shown_while_text_arrives() -> None:
    console = terminal()
    parts = [AnswerPart("It is "), AnswerPart("Paris.\nReally"), AnswerPart(completion_tokens=7)]
    answer = show_answer(parts, console)
    assert answer.text == "It is Paris.\nReally"
    text = printed(console)
    assert "1 token" in text
    assert "7 tokens" in text
    assert text.index("It is Paris.\n") < text.index("Really")


def test_ctrl_c_keeps_what_has_arrived() -> None:
    def parts() -> Iterator[AnswerPart]:
        yield AnswerPart("It is")
        raise KeyboardInterrupt

    answer = show_answer(parts(), terminal())
    assert answer.text == "It is"
    assert answer.finish_reason == "cancelled"
    assert "ended by cancelled" in answer.summary


def test_model_output_is_never_taken_for_markup() -> None:
    console = terminal()
    show_answer([AnswerPart("[red]x[/red] [link=y]z")], console)
    assert "[red]x[/red] [link=y]z" in printed(console)


def test_the_rate_counts_from_first_to_last_token() -> None:
    answer = Answer(text="x", num_tokens=11, first_token_seconds=1.0, seconds=3.0)
    assert answer.summary == "11 tokens, 5.0 tokens/s, first after 1.00 s"
    assert Answer().summary == "0 tokens"


def test_a_gateway_that_asks_for_a_key_gets_it(gateway: StandInGateway, url: str) -> None:
    gateway.api_key = "tl-secret"
    for arguments, environment in (
        (["--api-key", "tl-secret"], {}),
        ([], {"TOKENLINE_API_KEY": "tl-secret"}),
    ):
        result = run_chat(url, "Where?", *arguments, **environment)
        assert (result.returncode, result.stdout) == (0, "It is Paris.\nReally\n")
    for key in ("", "tl-other"):
        result = run_chat(url, "Where?", TOKENLINE_API_KEY=key)
        assert result.returncode == 1
        assert "No key. Give a key with --api-key or TOKENLINE_API_KEY" in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("key", ["tl-\u00e9", "a\nb", " secret"])
def test_a_key_that_no_header_can_carry_is_one_line(key: str) -> None:
    with pytest.raises(CommandError, match="--api-key: a key has neither") as caught:
        GatewayClient("http://127.0.0.1:9", key)
    assert key not in str(caught.value)
