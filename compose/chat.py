"""A conversation with the model, in the terminal."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Final

from rich.console import Console

from compose.answer_view import Answer, show_answer
from compose.errors import CommandError
from compose.gateway_client import GatewayClient

with contextlib.suppress(ImportError):
    # Importing it gives input() line editing and history; some builds of Python lack it.
    import readline  # noqa: F401


# A small model talks nonsense at OpenAI's 1.0; its makers advise this.
DEFAULT_TEMPERATURE: Final = 0.2
# Small models may never end by themselves.
DEFAULT_MAX_TOKENS: Final = 512


class Conversation:
    """The messages so far, and how to get the next one.

    Without `max_tokens` an answer may have DEFAULT_MAX_TOKENS, or half of what a small context
    holds.
    """

    def __init__(
        self,
        client: GatewayClient,
        console: Console,
        system: str = "",
        temperature: float = DEFAULT_TEMPERATURE,
        max_tokens: int | None = None,
    ) -> None:
        self._client = client
        self._console = console
        model = client.model()
        self._model = model.name
        self._messages = [{"role": "system", "content": system}] if system else []
        room = DEFAULT_MAX_TOKENS if model.max_model_len is None else model.max_model_len // 2
        self._parameters = {
            "temperature": temperature,
            "max_tokens": max_tokens or max(1, min(DEFAULT_MAX_TOKENS, room)),
        }

    @property
    def description(self) -> str:
        """With whom one talks, and how."""
        temperature, max_tokens = self._parameters["temperature"], self._parameters["max_tokens"]
        return (
            f"{self._model} at {self._client.url} (temperature {temperature:g}, answers of at most "
            f"{max_tokens} tokens; see --help)"
        )

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
        # Where both go to one place, the summary comes last.
        sys.stdout.flush()
        sys.stderr.write(f"{answer.summary}\n")
    return 130 if answer.finish_reason == "cancelled" else 0


def talk(conversation: Conversation, console: Console) -> int:
    """Reads questions until the input ends; returns the exit code of the command."""
    console.print(
        f"Talking to {conversation.description}. Ctrl-C ends an answer, Ctrl-D the conversation.",
        style="dim",
        markup=False,
        highlight=False,
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
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            # As in a shell: the line is given up, not the conversation.
            console.print("\nCtrl-D ends the conversation.", style="dim")
            continue
        if question:
            yield question
