"""Sends generated requests to a gateway and holds each answer to /openapi.json.

`python -m tests.fuzz_openapi --cases 3000` runs it against a gateway over scripted services.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as declared

from tests.fakes.gateway_line import MODEL, gateway_line
from tests.fakes.valkey import Valkey

CHECKS = [
    not_a_server_error,
    declared.status_code_conformance,
    declared.content_type_conformance,
    declared.response_headers_conformance,
    declared.response_schema_conformance,
]
REQUIRED = ("model", "messages", "prompt", "input", "max_tokens", "tokens")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@contextmanager
def line_in_a_thread(redis_url: str) -> Iterator[str]:
    """A gateway over scripted services on a thread's own loop; yields its URL."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    url = ""

    async def serve() -> None:
        nonlocal url
        try:
            async with gateway_line(redis_url, redis_prefix="fuzz:") as line:
                url = line.url
                started.set()
                await stop.wait()
        finally:
            started.set()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    assert url, "the line did not start"
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def fuzz(url: str, num_cases: int, seed: int = 0) -> Counter[str]:
    """Sends `num_cases` requests; counts the answers by operation and status.

    Raises what the first answer that is not as declared raises, after shrinking.
    """
    document = requests.get(f"{url}/openapi.json", timeout=10).json()
    operations = [
        found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()
    ]
    # Bodies have far more to get wrong than paths, and where there is neither, one case is all.
    weights = [
        8 if operation.body else 1 if operation.path_parameters else 0 for operation in operations
    ]
    shares = itertools.product(zip(operations, weights, strict=True), MODES)
    unit = num_cases / (len(MODES) * sum(weights))
    answers: Counter[str] = Counter()
    with requests.Session() as session:
        for (operation, weight), mode in shares:
            _fuzz_operation(
                operation, mode, max(1, round(unit * weight)), seed, session, url, answers
            )
    return answers


def _fuzz_operation(
    operation: Any,
    mode: GenerationMode,
    num_cases: int,
    seed: int,
    session: requests.Session,
    url: str,
    answers: Counter[str],
) -> None:
    if mode is GenerationMode.NEGATIVE and not operation.body:
        mode = GenerationMode.POSITIVE

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = _likely_accepted(case.body)
        response = case.call(base_url=url, session=session, timeout=30)
        answers[f"{operation.method.upper()} {operation.path} {response.status_code}"] += 1
        case.validate_response(response, checks=CHECKS)

    send()


def _likely_accepted(body: dict[str, Any]) -> dict[str, Any]:
    """A few of the fields, with the model's name and, for some, messages that are a chat.

    Of many random fields, one is refused nearly always, and nothing behind the checks is reached.
    """
    optional = [name for name in body if name not in (*REQUIRED, "stream")]
    dropped = set(optional[len(optional) % 4 :])
    kept = {name: value for name, value in body.items() if name not in dropped}
    if "model" in kept:
        kept["model"] = MODEL
    if "messages" in kept and len(optional) % 2:
        kept["messages"] = [{"role": "user", "content": "hi"}]
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        Valkey(Path(directory)) as valkey,
        line_in_a_thread(valkey.url) as url,
    ):
        answers = fuzz(url, arguments.cases, arguments.seed)
    for answer, count in sorted(answers.items()):
        sys.stdout.write(f"{count:6} {answer}\n")
    sys.stdout.write(f"{sum(answers.values()):6} answers, all as declared\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
