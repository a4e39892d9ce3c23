"""Waits until every gateway of a line says that it is ready, and tells what is missing."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import httpx2

_POLL_SECONDS: Final = 0.1
_ANSWER_SECONDS: Final = 5.0


async def wait_until_ready(urls: Sequence[str], on_status: Callable[[str], None]) -> str:
    """Returns the name of the model once `/readyz` of each of `urls` answers 200.

    `on_status` gets a few words on what is still missing, whenever they change. There is no time
    limit: a large model loads for minutes, and the supervisor notices what has crashed.
    """
    last_status = ""
    model = ""
    async with httpx2.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False) as client:
        for url in urls:
            while True:
                model, status = await _look(client, url)
                if not status:
                    break
                if status != last_status:
                    on_status(status)
                    last_status = status
                await asyncio.sleep(_POLL_SECONDS)
    return model


async def _look(client: httpx2.AsyncClient, url: str) -> tuple[str, str]:
    """The model that the gateway at `url` serves, and what it waits for; one of them is empty."""
    try:
        answer = await client.get(f"{url}/readyz")
        body = answer.json()
    except (httpx2.HTTPError, ValueError):
        return "", "waiting for the gateway"
    if answer.status_code == 200:
        return str(body["model"]), ""
    return "", f"waiting: {'; '.join(body['missing'])}"
