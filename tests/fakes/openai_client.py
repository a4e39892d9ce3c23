"""OpenAI's own client, of a line's gateway or of another one beside it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openai import AsyncOpenAI

from tests.fakes.gateway_line import GatewayLine, serving_gateway


def client_of(url: str, api_key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)


@asynccontextmanager
async def second_gateway(line: GatewayLine) -> AsyncIterator[AsyncOpenAI]:
    """A client of another gateway of the same line."""
    async with (
        serving_gateway(line.settings) as port,
        client_of(f"http://127.0.0.1:{port}") as made,
    ):
        yield made
