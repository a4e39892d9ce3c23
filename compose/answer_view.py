"""Shows an answer while it arrives, with its tokens per second."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from compose.gateway_client import AnswerPart


@dataclass
class Answer:
    """What has arrived of an answer. Until the end, events stand for tokens in the count."""

    text: str = ""
    finish_reason: str = ""
    num_tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def summary(self) -> str:
        """`42 tokens, 61.3 tokens/s, first after 0.12 s`; the rate is from first token to last."""
        decode_seconds = self.seconds - self.first_token_seconds
        rate = (self.num_tokens - 1) / decode_seconds if decode_seconds > 0 else 0.0
        words = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if rate > 0:
            words.append(f"{rate:.1f} tokens/s")
        if self.num_tokens:
            words.append(f"first after {self.first_token_seconds:.2f} s")
        if self.finish_reason not in ("", "stop"):
            words.append(f"ended by {self.finish_reason}")
        return ", ".join(words)


def show_answer(parts: Iterable[AnswerPart], console: Console) -> Answer:
    """Prints the text of `parts` as it comes; Ctrl-C ends it early, with reason `cancelled`.

    Elsewhere than in a terminal, the text alone goes out, and the caller reports the summary.
    """
    answer = Answer()
    if not console.is_terminal:
        _collect(parts, answer, lambda text: console.out(text, end="", highlight=False))
        console.out()
        return answer
    # Whole lines scroll away above; the region redrawn is the last line and the rate.
    last_line = ""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def on_text(text: str) -> None:
            nonlocal last_line
            *lines, last_line = (last_line + text).split("\n")
            for line in lines:
                console.print(Text(line))
            live.update(Group(Text(last_line), Text(answer.summary, style="dim")), refresh=True)

        _collect(parts, answer, on_text)
    console.print(Text(last_line))
    console.print(Text(answer.summary, style="dim"))
    return answer


def _collect(parts: Iterable[AnswerPart], answer: Answer, on_text: Callable[[str], None]) -> None:
    started = time.monotonic()
    try:
        for part in parts:
            answer.seconds = time.monotonic() - started
            if part.text:
                if not answer.text:
                    answer.first_token_seconds = answer.seconds
                answer.text += part.text
                answer.num_tokens += 1
                on_text(part.text)
            answer.finish_reason = part.finish_reason or answer.finish_reason
            if part.completion_tokens is not None:
                answer.num_tokens = part.completion_tokens
    except KeyboardInterrupt:
        answer.finish_reason = "cancelled"
