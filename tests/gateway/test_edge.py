"""What every route has in common: API keys, CORS, request ids."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from gateway.new_api_key import entry
from gateway.settings import parse_origins
from tests.fakes.gateway_line import GatewayLine, gateway_line
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGIN = "https://app.example"
KEY = {"authorization": "Bearer secret"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def line(
    valkey: Valkey, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayLine]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(entry("ann", "secret"))
    settings: Any = {"api_keys": path, "cors_origins": (ORIGIN,)}
    async with gateway_line(valkey.url, redis_prefix="edge:", **settings) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/v1/requests"),
        ("DELETE", "/v1/requests/x"),
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/nowhere"),
        ("OPTIONS", "/v1/models"),
    ],
)
async def test_every_route_wants_a_key(line: GatewayLine, method: str, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        response = await line.client.request(method, path, headers=headers)
        assert response.status_code == 401
        error = response.json()["error"]
        assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
        assert response.headers["x-request-id"]
        assert response.headers["www-authenticate"].split()[0] == (
            "Basic" if path == "/" else "Bearer"
        )
    response = await line.client.request(method, path, headers=KEY)
    assert response.status_code != 401


async def test_health_wants_no_key(line: GatewayLine) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await line.client.get(path)).status_code == 200


async def test_metrics_can_be_public(valkey: Valkey, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(entry("ann", "secret"))
    settings: Any = {"api_keys": tmp_path / "keys", "public_metrics": True}
    async with gateway_line(valkey.url, redis_prefix="public:", **settings) as running:
        assert (await running.client.get("/metrics")).status_code == 200
        assert (await running.client.get("/v1/models")).status_code == 401


async def test_a_key_lets_a_chat_through_and_keeps_its_cache_blocks_apart(
    line: GatewayLine,
) -> None:
    line.client.headers["x-api-key"] = "secret"
    try:
        for stream in (False, True):
            assert (await line.chat(stream=stream)).status_code == 200
        await line.chat(cache_salt="mine")
        salts = [submit.record.cache_salt for submit in line.detok.submitted]
        assert salts == ["ann:", "ann:", "ann:mine"]
    finally:
        del line.client.headers["x-api-key"]


async def test_browsers_may_ask_before_they_show_a_key(line: GatewayLine) -> None:
    headers = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    response = await line.client.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "x-stainless-os" in response.headers["access-control-allow-headers"]
    refused = await line.client.options(
        "/v1/chat/completions", headers={**headers, "origin": "https://evil.example"}
    )
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


async def test_answers_and_errors_can_be_read_by_allowed_pages_only(line: GatewayLine) -> None:
    for headers, status in ((KEY, 200), ({}, 401)):
        for origin, allowed in ((ORIGIN, ORIGIN), ("https://evil.example", None)):
            response = await line.client.get("/v1/models", headers={**headers, "origin": origin})
            assert response.status_code == status
            assert response.headers.get("access-control-allow-origin") == allowed
    exposed = (await line.client.get("/v1/models", headers={**KEY, "origin": ORIGIN})).headers
    assert "x-request-id" in exposed["access-control-expose-headers"]


async def test_without_origins_nothing_is_said_about_them(valkey: Valkey) -> None:
    async with gateway_line(valkey.url, redis_prefix="plain:") as running:
        response = await running.client.get("/v1/models", headers={"origin": ORIGIN})
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_counts_name_the_route(line: GatewayLine) -> None:
    async def get(path: str) -> httpx2.Response:
        return await line.client.get(path, headers=KEY)

    await get("/v1/models/tiny")
    await get("/v1/models/a/b")
    await get("/nowhere/at/all")
    text = (await get("/metrics")).text
    assert 'endpoint="/v1/models/{model}",status="200"' in text
    assert 'endpoint="/v1/models/{model}",status="404"' in text
    assert 'endpoint="other",status="404"' in text
    assert "nowhere" not in text


async def test_origins_are_checked_at_start() -> None:
    assert parse_origins("https://a.b, http://localhost:3000/") == (
        "https://a.b",
        "http://localhost:3000",
    )
    assert parse_origins("*") == ("*",)
    for wrong in ("a.b", "https://a.b/path"):
        with pytest.raises(ValueError, match="expected an origin"):
            parse_origins(wrong)
