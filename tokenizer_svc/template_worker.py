"""A process that renders chat templates: `python -m tokenizer_svc.template_worker`.

A template is a program from a model file. Jinja's sandbox keeps it from Python's internals; this
process keeps it from the service's time and memory, and from every file. It also takes the work
of reading chats and rendering, which holds the interpreter lock, away from the service's event
loop. Started by template_workers.py; speaks template_messages.py on its standard streams.
"""

import resource
import signal
import sys
import traceback

from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.prompt_renderer import PromptRenderer
from tokenizer_svc.template_messages import (
    Render,
    Rendered,
    Setup,
    SetupDone,
    encode,
    receive_blocking,
)


def main() -> None:
    """Sets up, then answers one message after another until the pipe ends."""
    # The service decides when its workers end: it closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What is written by accident must not land among the messages.
    commands, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    setup = receive_blocking(commands, Setup)
    if setup is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (setup.max_memory_bytes,) * 2)
    renderer = None
    with _Alarm(setup.max_seconds):
        try:
            renderer = PromptRenderer(
                setup.templates,
                setup.special_tokens,
                setup.control_texts,
                setup.max_output_characters,
            )
            done = SetupDone(
                turn_ends=sorted(renderer.turn_ends), tool_call_format=renderer.tool_call_format
            )
        except ChatRefused as refusal:
            done = SetupDone(error=refusal.message)
        except Exception as error:
            traceback.print_exc()
            done = SetupDone(error=f"it fails with {type(error).__name__}")
    answers.write(encode(done))
    answers.flush()
    # No further file, now that Python has loaded what compiling and rendering need.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    while renderer is not None and (render := receive_blocking(commands, Render)) is not None:
        with _Alarm(setup.max_seconds):
            answer = _render(renderer, render)
        answers.write(encode(answer))
        answers.flush()


def _render(renderer: PromptRenderer, render: Render) -> Rendered:
    try:
        prompt = renderer.render(
            render.messages_json,
            render.tools_json,
            render.variables_json,
            render.add_generation_prompt,
            render.continue_final_message,
        )
        return Rendered(text=prompt.text, stand_ins=dict(prompt.stand_ins))
    except ChatRefused as refusal:
        return Rendered(refusal=refusal.message, param=refusal.param, code=refusal.code)
    except MemoryError:
        return Rendered(refusal="The chat needs too much memory.", param="messages")
    except RecursionError:
        return Rendered(refusal="The chat is nested too deeply.", param="messages")
    # Whatever else a chat does to this process, the next chat finds it alive.
    except Exception:
        traceback.print_exc()
        return Rendered(
            refusal="The chat cannot be rendered; a field of it may be of another kind than usual.",
            param="messages",
        )


class _Alarm:
    """Inside it, the kernel ends this process after `seconds`, whatever it is doing."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
