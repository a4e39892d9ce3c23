"""What the launcher prints once its line is ready."""

import json
import re
import shlex

from rich.console import Console

from compose.line import Line
from compose.own_command import own_command
from compose.readiness import Readiness


def print_welcome(line: Line, readiness: Readiness, seconds: float, console: Console) -> None:
    """Where the API is, what to try, and what is not as it should be."""
    url, command = line.gateway_urls[0], own_command()
    lines = [
        "",
        f"Tokenline is ready at {url}/v1 (model {readiness.model}, {seconds:.1f} s)",
        *(f"another gateway answers at {other}/v1" for other in line.gateway_urls[1:]),
        "",
        example_curl(url, readiness.model),
        "",
        f"Also: `{command} chat` talks in the terminal, `{command} ps` shows the processes, "
        "Ctrl-C stops them.",
        "",
    ]
    for text in lines:
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    if not readiness.has_redis:
        console.print(
            f"WARNING: Redis cannot be reached at {_without_password(line.redis_url)}. Requests "
            "are answered, but not recorded: /v1/requests answers 503 until Redis is there.\n",
            soft_wrap=True,
            markup=False,
            highlight=False,
            style="bold red",
        )


def example_curl(url: str, model: str) -> str:
    """A command, ready to paste into a shell, that streams an answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
        "temperature": 0,
        "stream": True,
    }
    return (
        f"curl -N {url}/v1/chat/completions \\\n"
        "  -H 'content-type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(body))}"
    )


def _without_password(url: str) -> str:
    return re.sub(r"(?<=://)[^/]*@", "***@", url)
