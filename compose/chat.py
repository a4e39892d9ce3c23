"""A conversation with the model, in the terminal."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from compose.answer_view import Answer, show_answer
from compose.errors import CommandError
from compose.gateway_client import GatewayClient

with contextlib.suppress(ImportError):
    # Importing it gives input() line editing and history; some builds of Python lack it.
    import readline  # noqa: F401


class Conversation:
    """The messages so far, and how to get the next one."""

    def __init__(
        self, client: GatewayClient, console: Console, system: str, parameters: Mapping[str, Any]
    ) -> None:
        self._client = client
        self._console = console
        self._model = client.model_name()
        self._messages = [{"role": "system", "content": system}] if system else []
        self._parameters = parameters

    @property
    def model(self) -> str:
        return self._model

    def ask(self, question: str) -> Answer:
        """Sends `question` and shows the answer. On an error the question is forgotten."""
        messages = [*self._messages, {"role": "user", "content": question}]
        parts = self._client.stream_chat(self._model, messages, self._parameters)
        # Closing cancels the request where Ctrl-C ended the answer early.
        with contextlib.closing(parts):
            answer = show_answer(parts, self._console)
        # A cancelled answer stays as far as it came: that is what the person has seen.
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def ask_once(conversation: Conversation, question: str) -> int:
    """Answers one question; returns the exit code of the command."""
    answer = conversation.ask(question)
    if not sys.stdout.isatty():
        sys.stderr.write(f"{answer.summary}\n")
    return 130 if answer.finish_reason == "cancelled" else 0


def talk(conversation: Conversation, console: Console) -> int:
    """Reads questions until the input ends; returns the exit code of the command."""
    console.print(
        f"Talking to {conversation.model}. Ctrl-C ends an answer, Ctrl-D the conversation.",
        style="dim",
    )
    for question in _questions(console):
        try:
            conversation.ask(question)
        except CommandError as error:
            console.print(str(error), style="red", markup=False)
    return 0


def _questions(console: Console) -> Iterator[str]:
    prompt = "> " if console.is_terminal else ""
    while True:
        try:
            question = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question:
            yield question
