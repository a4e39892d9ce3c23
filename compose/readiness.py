"""Waits until every gateway of a line says that it is ready, and tells what is missing."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import httpx2

_POLL_SECONDS: Final = 0.1
_ANSWER_SECONDS: Final = 5.0


async def wait_until_ready(urls: Sequence[str], on_status: Callable[[str], None]) -> None:
    """Returns when `/readyz` of each of `urls` answers 200.

    `on_status` gets a few words on what is still missing, whenever they change. There is no time
    limit: a large model loads for minutes, and the supervisor notices what has crashed.
    """
    last_status = ""
    async with httpx2.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False) as client:
        for url in urls:
            while status := await _missing(client, url):
                if status != last_status:
                    on_status(status)
                    last_status = status
                await asyncio.sleep(_POLL_SECONDS)


async def _missing(client: httpx2.AsyncClient, url: str) -> str:
    """What the gateway at `url` waits for; empty when it is ready."""
    try:
        answer = await client.get(f"{url}/readyz")
    except httpx2.HTTPError:
        return "waiting for the gateway"
    if answer.status_code == 200:
        return ""
    return f"waiting for {_reason(answer)}"


def _reason(answer: httpx2.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text.strip() or "the services"
    if not isinstance(body, dict):
        return "the services"
    error = body.get("error")
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return str(body.get("message") or "the services")
